"""Reprieve inside `model.generate`, for code that already speaks transformers."""

from transformers import AutoModelForCausalLM, AutoTokenizer

import reprieve
from reprieve.models.loading import bundled_folder

tokenizer = AutoTokenizer.from_pretrained(bundled_folder("target"))
target = AutoModelForCausalLM.from_pretrained(bundled_folder("target"))
draft = AutoModelForCausalLM.from_pretrained(bundled_folder("draft"))
prompt = tokenizer("Question: Iris has 8 books. She buys 5 more books. How many?\nAnswer:", return_tensors="pt")
output = target.generate(
    prompt.input_ids,
    custom_generate=reprieve.custom_generate,
    draft_model=draft,
    text_tokenizer=tokenizer,
    rule="fuzzy:threshold=0.3",
    max_new_tokens=80,
)
print(tokenizer.decode(output[0]))
