"""Serve the bundled pair and ask at two leniency levels with OpenAI's own client; from a shell: `reprieve serve`."""

import threading
import time

import openai
import uvicorn

import reprieve
from reprieve.serving.policy import Policy
from reprieve.serving.server.app import Settings
from reprieve.serving.server.launch import make_app
from reprieve.tasks import load_task

rule = Policy.load("judge:path=reprieve/arithmetic-judge,threshold=0.04")
app = make_app(reprieve.load_pair(), [rule], Settings(model="pair"), num_draft_tokens=8)
server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
thread = threading.Thread(target=server.run)
thread.start()
while not server.started:
    time.sleep(0.1)

port = server.servers[0].sockets[0].getsockname()[1]
client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
prompt = load_task("arithmetic").problems("test", 1)[0].prompt
for level in ("strict", "certified"):
    answer = client.completions.create(
        model="pair", prompt=prompt, max_tokens=80, temperature=0, extra_body={"reprieve_leniency": level}
    )
    told = answer.model_extra["reprieve"]
    print(f"{level}: {answer.choices[0].text.strip()}")
    print(f"  {told['rule']}: {told['tokens_per_round']:.1f} tokens a round, {told['num_rescued']} rescued")

server.should_exit = True
thread.join()
