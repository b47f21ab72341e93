// Requests to the server that this page came from; what goes wrong is said in words.

/** What a person is to read. `needsKey`: another API key may help; `isRefusal`: the request itself has to change. */
export class Problem extends Error {
  constructor(message, { needsKey = false, isRefusal = false } = {}) {
    super(message);
    this.needsKey = needsKey;
    this.isRefusal = isRefusal;
  }
}

const UNREACHABLE = "The server cannot be reached. Is it still running, and is the network up?";
const CUT = "The connection was cut before the answer was complete.";
const FOREIGN = "What answered is not the text generation API. Is there a proxy in between?";

/** The address of a route, with the prefix that a proxy may have added. */
export const address = (path) => new URL(path, document.baseURI).href;

/** The JSON or text that a GET route answers. Throws Problem. */
export const get = (path, kind = "json") => ask(path, kind, { cache: "no-store" });

/** The JSON that a POST route answers. Throws Problem. */
export const post = (path, body, { key, signal }) => (
  ask(path, "json", { method: "POST", headers: headersFor(key), body: JSON.stringify(body), signal }));

async function ask(path, kind, options) {
  let response;
  try {
    response = await fetch(address(path), options);
    if (response.ok) return await response[kind]();
  } catch {
    throw new Problem(response ? FOREIGN : UNREACHABLE);
  }
  throw await refusal(response, "");
}

/**
 * The events of a streaming POST route, as objects. `isLast` says of an event that nothing has to follow it; a stream
 * that ends without one was cut. Throws Problem, or AbortError after `signal`.
 */
export async function* events(path, body, { key, signal, isLast }) {
  let response;
  try {
    response = await fetch(address(path), { method: "POST", headers: headersFor(key), body: JSON.stringify(body), signal });
  } catch (error) {
    if (signal.aborted) throw error;
    if (error.name === "TypeError" && /header|ISO-8859/i.test(error.message)) {
      throw new Problem("The API key has characters that a key cannot have.", { needsKey: true });
    }
    throw new Problem(UNREACHABLE);
  }
  if (!response.ok) throw await refusal(response, key);
  if (!(response.headers.get("content-type") ?? "").startsWith("text/event-stream")) throw new Problem(FOREIGN);
  let isComplete = false;
  for await (const data of dataLines(response.body, signal)) {
    if (data === "[DONE]") return;
    const event = parsed(data);
    if (event.error) throw new Problem(`The server stopped with an error: ${event.error.message ?? event.error}`);
    isComplete = isLast(event);
    yield event;
  }
  if (!isComplete) throw new Problem(CUT);
}

const headersFor = (key) => ({ "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) });

/** What follows `data:` in each line of a stream. */
async function* dataLines(stream, signal) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } catch (error) {
    if (signal.aborted) throw error;
    throw new Problem(CUT);
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new Problem(FOREIGN);
  }
}

/** Why a request was refused. */
async function refusal(response, key) {
  const text = await response.text().catch(() => "");
  let said = "";
  try {
    const { error } = JSON.parse(text);
    said = error?.message ?? error ?? "";
  } catch {
    // An answer of something else than the server: its status has to do.
  }
  const { status } = response;
  if (status === 401) {
    const words = key ? "The server refuses this API key." : "The server asks for an API key.";
    return new Problem(`${words} Enter the right one in the settings.`, { needsKey: true });
  }
  if (status === 429) {
    const seconds = response.headers.get("retry-after");
    return new Problem(`The server has too much to do.${seconds ? ` Try again in ${seconds} s.` : " Try again later."}`);
  }
  if (said) return new Problem(`The server refused the request: ${said}`, { isRefusal: status < 500 });
  if (status === 413) return new Problem("The request is larger than the server allows.", { isRefusal: true });
  if (status >= 500) return new Problem(`The server does not answer; something before it says status ${status}.`);
  return new Problem(`The request was refused with status ${status}. ${FOREIGN}`);
}
