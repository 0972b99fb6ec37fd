// Calls of the server that this page came from.

export class Failure extends Error {
  constructor(message, status = 0) { super(message); this.status = status; }
}

export async function deployment(key) {
  const answer = await called("/playground/deployment", { headers: headers(key) });
  return answer.json();
}

// What the server does in the next seconds, as a file for ui.perfetto.dev.
export async function timeline(seconds, key) {
  const answer = await called(`/playground/timeline?seconds=${encodeURIComponent(seconds)}`, { headers: headers(key) });
  return answer.blob();
}

// The chunks of one streamed response.
export async function* stream(path, body, key, signal) {
  const answer = await called(path, { method: "POST", body: JSON.stringify(body), headers: headers(key), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => { throw cut(error); });
    if (done) throw new Failure("The response broke off: the server ended the connection.");
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Failure(chunk.error.message);
      yield chunk;
    }
  }
}

async function called(path, options) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    throw cut(error);
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  throw new Failure(body.error?.message ?? `The server answers ${answer.status} ${answer.statusText}.`, answer.status);
}

function cut(error) {
  if (error.name === "AbortError") return error;
  const reason = navigator.onLine ? "it is away, or restarts" : "this browser is offline";
  return new Failure(`The server at ${location.host} does not answer: ${reason}. Run again when it is back.`);
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}
