"""Serve the bundled pair and ask at two leniency levels with OpenAI's own client."""

import atexit
import subprocess
import sys
import time
import urllib.request

import openai

import reprieve

PORT = "8123"
command = ["serve", "--port", PORT, "--rule", "judge:threshold=0.1"]
server = subprocess.Popen([sys.executable, "-m", "reprieve.cli.main", *command])
url = f"http://127.0.0.1:{PORT}"
atexit.register(server.terminate)
for _ in range(300):
    try:
        urllib.request.urlopen(f"{url}/health")
        break
    except OSError:
        time.sleep(0.2)

client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id
prompt = reprieve.load_task("word_problems").problems("test", 7)[6].prompt
for level in ("strict", "certified"):
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=80, temperature=0, extra_body={"reprieve_leniency": level}
    )
    report = answer.model_extra["reprieve"]
    print(f"{level}: {answer.choices[0].text.strip()}")
    print(f"  {report['rule']}: {report['tokens_per_round']:.1f} tokens per round, {report['num_rescued']} rescued")
