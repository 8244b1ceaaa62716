// Vercel's AI SDK with its provider for OpenAI: `openai(model)` is its default, the Responses API,
// which names the model's items by id from the second step on; `openai.chat(model)` is chat.
//
// Called as toolbox.py says, with the task's words and the folder of its packages in the environment.

const { execFileSync } = require("node:child_process");
const { createRequire } = require("node:module");

const packages = createRequire(process.env.PACKAGES + "/");
const { createOpenAI } = packages("@ai-sdk/openai");
const { generateText, jsonSchema, stepCountIs, streamText, tool } = packages("ai");

const [baseURL, apiKey, dialect, mode] = process.argv.slice(2);
const task = JSON.parse(process.env.TASK);
const calls = [];

function run({ command, timeout = 10 }) {
  calls.push([task.tool, { command, timeout }]);
  const options = { encoding: "utf8", timeout: timeout * 1000 };
  return execFileSync("/bin/sh", ["-c", `${command} 2>&1`], options);
}

async function main() {
  const openai = createOpenAI({ baseURL, apiKey });
  const asked = {
    model: dialect === "chat" ? openai.chat("policy") : openai("policy"),
    system: task.system,
    prompt: task.question,
    tools: {
      [task.tool]: tool({
        description: task.text,
        inputSchema: jsonSchema(task.parameters),
        execute: run,
      }),
    },
    stopWhen: stepCountIs(task.turns),
    maxRetries: 0,
  };
  const answer = mode === "stream" ? streamText(asked) : await generateText(asked);
  const final = await answer.text;
  const reasoning = (await answer.steps).map((step) => step.reasoningText ?? "");
  process.stdout.write(JSON.stringify({ final, calls, reasoning }) + "\n");
}

main();
