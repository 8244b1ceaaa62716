// Tool calls as calls: `search(query="red", limit=3)`, whatever API an agent wrote them in.

/** The calls of a message: Chat Completions' tool_calls, or parts of its content. */
export function callsOf(said) {
  const parts = Array.isArray(said.content) ? said.content.filter(isCall) : [];
  return [...(said.tool_calls ?? []), ...(said.function_call ? [said.function_call] : []), ...parts].map(callText);
}

/** Whether a part of a message's content is a call: Anthropic's tool_use, Responses' function_call. */
export const isCall = (part) => ["tool_use", "function_call", "custom_tool_call"].includes(part?.type);

export function callText(call) {
  const called = call.function ?? call.custom ?? call;
  const given = called.arguments ?? called.input ?? {};
  return `${called.name ?? "?"}(${argumentsText(parsed(given))})`;
}

/** JSON text as its value; other text, such as what a model cut short, as it is. */
function parsed(given) {
  if (typeof given !== "string") return given;
  try {
    return JSON.parse(given || "{}");
  } catch {
    return given;
  }
}

function argumentsText(given) {
  if (typeof given === "string") return given;
  if (given === null || typeof given !== "object" || Array.isArray(given)) return JSON.stringify(given);
  return Object.entries(given).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(", ");
}
