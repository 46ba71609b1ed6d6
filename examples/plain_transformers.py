"""Reprieve inside `model.generate`, for code that already uses transformers."""

import reprieve

pair = reprieve.load_pair()  # or any two transformers models with the same tokenizer
tokenizer = pair.tokenizer
prompt = tokenizer(
    "Question: Iris has 18 books. She buys 5 more. She sells 9 books. How many books does Iris have now?\nAnswer:",
    return_tensors="pt",
)
output = pair.target.generate(
    prompt.input_ids,
    custom_generate=reprieve.custom_generate,
    draft_model=pair.draft,
    text_tokenizer=tokenizer,
    rule="fuzzy:threshold=1,divergence=kl,form=released",
    max_new_tokens=80,
)
print(tokenizer.decode(output[0]))
