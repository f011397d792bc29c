"""Token pairs as rows in which every shared prefix is computed once. numpy only."""
