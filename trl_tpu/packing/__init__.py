"""Token pairs in rows that hold every shared prefix once. numpy only."""
