"""Models and tokenizers that must be refused, and the words that each error must hold."""

from bad_input import (
    CHAT,
    Case,
    both,
    code_in_the_folder,
    cut,
    edit_json,
    empty_folder,
    flags,
    in_shards,
    learned_positions,
    model_file,
    rows,
    set_to,
    tokenizer,
)

MORE_TOKENS = [f"<more{number}>" for number in range(99)]
SECOND = "model-00002-of-00002.safetensors"

MODELS = {
    "no such model": Case(flags(model_name_or_path="{folder}/no"), ["DIR/no"]),
    "an empty folder for a model": Case(empty_folder("model_name_or_path"), ["DIR/empty"]),
    "a broken config.json": Case(model_file("config.json", b'{"model_type": "llama",'), ["DIR/model", "config"]),
    "no model_type": Case(edit_json("config.json", lambda c: c.pop("model_type")), ["`model_type`"]),
    "a model that classifies no text": Case(edit_json("config.json", set_to(model_type="clip")), ["CLIPConfig"]),
    "no weights": Case(model_file("model.safetensors", None), ["no file named model.safetensors", "DIR/model"]),
    "half of the weights": Case(cut("model.safetensors", 0.5), ["DIR/model", "SafetensorError"]),
    "a shard that is missing": Case(both(in_shards, model_file(SECOND, None)), ["No such file", SECOND]),
    "an index of files elsewhere": Case(
        both(
            in_shards,
            edit_json("model.safetensors.index.json", lambda index: index["weight_map"].update(x="a/../../private")),
        ),
        ["DIR/model/model.safetensors.index.json", "'a/../../private'"],
    ),
    "a pickle that is none": Case(
        both(model_file("model.safetensors", None), model_file("pytorch_model.bin", b"no")),
        ["DIR/model", "Weights only"],
    ),
    "no tokenizer": Case(model_file("tokenizer.json", None), ["DIR/model", "tokenizer"]),
    "no chat template": Case(
        both(rows(CHAT), tokenizer(set_to(chat_template=None))),
        ["Row 0", "`chat_template_path`"],
    ),
    "a chat template with a fault": Case(
        both(rows(CHAT), tokenizer(set_to(chat_template="{% for x in %}"))),
        ["Row 0", "chat template"],
    ),
    "a chat template that refuses": Case(
        both(rows(CHAT), tokenizer(set_to(chat_template="{{ raise_exception('Only two roles') }}"))),
        ["Row 0", "['user', 'assistant']", "Only two roles"],
    ),
    "a chat template of nothing": Case(
        both(rows(CHAT), tokenizer(set_to(chat_template="{{ '' }}"))), ["Row 0", "`chosen_ids` holds no tokens"]
    ),
    "neither pad nor eos token": Case(tokenizer(set_to(pad_token=None, eos_token=None)), ["`tokenizer.pad_token`"]),
    "a tokenizer larger than the embeddings": Case(
        both(
            rows({"chosen": "a<more98>", "rejected": "b"}), tokenizer(lambda changed: changed.add_tokens(MORE_TOKENS))
        ),
        ["Row 0", "`chosen_ids` holds the token id", "272 rows", "resize_token_embeddings"],
    ),
    "code in the folder": Case(code_in_the_folder, ["DIR/model", "`trust_remote_code=True`"]),
    "a dialogue longer than the positions": Case(
        both(learned_positions, rows({"chosen": "a " * 999, "rejected": "b"}), flags(max_length="none")),
        ["train dataset", "row 0", "max_length=64"],
    ),
}
