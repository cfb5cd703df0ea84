// What openai-node makes of a router's answers: asks the one at argv[2], and prints what it got as JSON.
const OpenAI = require("openai");

const baseURL = process.argv[2] + "/v1";
const client = new OpenAI({ baseURL, apiKey: "right", maxRetries: 0, timeout: 10_000 });
const stranger = new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0, timeout: 10_000 });
const chat = (model, more = {}) => ({ model, messages: [{ role: "user", content: "Hello" }], ...more });

const asks = {
  bad_json: () => client.post("/chat/completions", { body: "{", headers: { "content-type": "application/json" } }),
  bad_value: () => client.chat.completions.create(chat("any", { speculative: "on" })),
  bad_options: () => client.chat.completions.create(chat("any", { stream_options: { include_usage: true } })),
  refused_by_engine: () => client.chat.completions.create(chat("refusing")),
  too_long: () => client.chat.completions.create(chat("small")),
  bad_key: () => stranger.chat.completions.create(chat("any")),
  no_model: () => client.chat.completions.create(chat("missing")),
  no_route: () => client.get("/../nowhere"),
  no_verb: () => client.delete("/chat/completions"),
  too_large: () => client.chat.completions.create(chat("any", { user: "x".repeat(1 << 20) })),
  engine_fails: () => client.chat.completions.create(chat("failing")),
  engine_down: () => client.chat.completions.create(chat("down")),
  engine_silent: () => client.chat.completions.create(chat("silent")),
};

async function error(ask) {
  try {
    await ask();
    return null;
  } catch (one) {
    const { status, code, param, type, message } = one;
    return { class: one.constructor.name, api: one instanceof OpenAI.APIError, status, code, param, type, message };
  }
}

async function read(model, more = {}) {
  const chunks = [];
  const read = { chunks };
  try {
    for await (const one of await client.chat.completions.create(chat(model, { stream: true, ...more }))) {
      chunks.push(one);
    }
    read.ended = true;
  } catch (one) {
    read.error = { class: one.constructor.name, api: one instanceof OpenAI.APIError, code: one.code, type: one.type };
  }
  return read;
}

// A stream that is given up after its first chunk; while it runs the only place is taken.
async function aborted() {
  const stream = await client.chat.completions.create(chat("endless", { stream: true }));
  let chunks = 0;
  let busy = null;
  for await (const _ of stream) {
    chunks += 1;
    busy = await error(() => client.chat.completions.create(chat("any")));
    stream.controller.abort();
  }
  return { chunks, busy };
}

async function main() {
  const errors = {};
  for (const [name, ask] of Object.entries(asks)) errors[name] = await error(ask);
  const usage = { stream_options: { include_usage: true } };
  return {
    errors,
    whole: await client.chat.completions.create(chat("any")),
    stream: await read("any"),
    with_usage: await read("any", usage),
    broken: await read("breaking"),
    aborted: await aborted(),
  };
}

main().then((result) => console.log(JSON.stringify(result)));
