// Access to the REST API: every request of the console goes through `request`.
//
// With security on, the browser sends a cookie that no script can read. The header proves that this
// page wrote the request, not a page of another site. On 401 the app shows the login page.

const root = new URL("../", import.meta.url);

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function url(path, query = {}) {
  const found = new URL(path.replace(/^\//, ""), root);
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== null && value !== "") found.searchParams.set(name, value);
  }
  return found;
}

export const part = encodeURIComponent;

/** Time until a request without an answer fails. A write waits longer: its commit may be slow. */
const READ_MS = 10_000;
const WRITE_MS = 30_000;

/**
 * Send a request. Return {headers, text} of the answer; with `stream`, return the response as soon as
 * its headers are here. Throw an ApiError if the broker refuses, or has not answered in time.
 */
export async function request(method, path, { query, body, headers = {}, signal, stream = false } = {}) {
  const late = new AbortController();
  const waits = method === "GET" ? READ_MS : WRITE_MS;
  const sent = {
    method,
    headers: { "Tidelog-Console": "1", ...headers },
    signal: signal ? AbortSignal.any([signal, late.signal]) : late.signal,
  };
  if (body !== undefined) {
    sent.headers["Content-Type"] ??= "application/json";
    sent.body = typeof body === "string" ? body : JSON.stringify(body);
  }
  const timer = setTimeout(() => late.abort(), waits);
  try {
    const answer = await fetch(url(path, query), sent);
    if (answer.status === 401) window.dispatchEvent(new Event("tidelog-login"));
    if (!answer.ok) throw await refusal(answer);
    return stream ? answer : { headers: answer.headers, text: await answer.text() };
  } catch (error) {
    if (error instanceof ApiError || signal?.aborted) throw error;
    throw new ApiError(0, 0, late.signal.aborted
      ? `The broker did not answer within ${waits / 1000} s.` : "The broker cannot be reached.");
  } finally {
    clearTimeout(timer);
  }
}

async function refusal(answer) {
  let said = {};
  try {
    said = await answer.json();
  } catch {
    // The answer is not tidelog's, but a proxy's page or empty: show only the status.
  }
  return new ApiError(answer.status, said.error_code, said.message || `HTTP ${answer.status}`);
}

/** The JSON of an answer; for a list in pages, with the items of all pages. */
export async function get(path, query, signal) {
  const found = JSON.parse((await request("GET", path, { query, signal })).text);
  let next = found?.metadata?.next;
  while (next) {
    const token = new URL(next).searchParams.get("page_token");
    const page = JSON.parse((await request("GET", path, { query: { ...query, page_token: token }, signal })).text);
    found.data.push(...page.data);
    next = page.metadata.next;
  }
  return found;
}

/** All items of a list. */
export const items = async (path, signal) => (await get(path, {}, signal)).data;

export async function send(method, path, body, headers) {
  const { text } = await request(method, path, { body, headers });
  return text ? JSON.parse(text) : null;
}

/**
 * Return a function from a request's content to its header Idempotency-Key. The key is the same until
 * the content changes. So if an answer is lost, the repeated request has no second effect.
 */
export function requestKeys() {
  let last;
  let key;
  return (content) => {
    const now = JSON.stringify(content);
    if (now !== last) {
      key = [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
      last = now;
    }
    return { "Idempotency-Key": `"${key}"` };
  };
}

let cluster;

/** The cluster's path in the v3 dialect. */
export async function v3() {
  cluster ??= get("v3/clusters").then((said) => `v3/clusters/${part(said.data[0].cluster_id)}`);
  try {
    return await cluster;
  } catch (error) {
    cluster = undefined;
    throw error;
  }
}

// -- records

const BINARY = { Accept: "application/vnd.kafka.binary.v2+json" };
const recordsPath = (topic, partition) => `topics/${part(topic)}/partitions/${partition}/records`;

/**
 * Fetch records, keys and values in base64: from `offset` or `timestamp` on, or the newest ones
 * before `before`. The result has `next`, the offset after the records. After a fetch by `before`,
 * `first` is the offset from which on no record is missing.
 */
export async function fetchRecords(topic, partition, { offset, timestamp, before, maxBytes, maxRecords, signal }) {
  const answer = await request("GET", recordsPath(topic, partition), {
    query: { offset, timestamp, before, max_bytes: maxBytes, max_records: maxRecords },
    headers: BINARY,
    signal,
  });
  const number = (name) => Number(answer.headers.get(`tidelog-${name}`));
  return {
    records: JSON.parse(answer.text),
    first: number("first-offset"),
    next: number("next-offset"),
    end: number("high-watermark"),
    start: number("log-start-offset"),
  };
}

/** The broker sends a keep-alive at least every 15 s. After this silence, connect again. */
const SILENCE_MS = 40_000;

/**
 * Follow a partition by server-sent events until the signal aborts. After a lost connection,
 * resume at the next offset. Uses fetch, because an EventSource cannot send headers.
 */
export async function follow(topic, partition, { offset, signal, onRecords, onState }) {
  let from = offset;
  while (!signal.aborted) {
    const silent = new AbortController();
    let timer;
    const waitAgain = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silent.abort(), SILENCE_MS);
    };
    try {
      const answer = await request("GET", recordsPath(topic, partition), {
        query: { offset: from, format: "binary" },
        headers: { Accept: "text/event-stream" },
        signal: AbortSignal.any([signal, silent.signal]),
        stream: true,
      });
      onState("live");
      waitAgain();
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        waitAgain();
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        const records = events.map(eventData).filter(Boolean);
        if (records.length) {
          from = records[records.length - 1].offset + 1;
          onRecords(records);
        }
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status >= 400 && error.status < 500) throw error;
    } finally {
      clearTimeout(timer);
    }
    onState("waiting");
    await new Promise((done) => setTimeout(done, 1000));
  }
}

function eventData(event) {
  const lines = event.split("\n");
  if (lines.some((line) => line.startsWith("event: "))) return null; // an error, or a notice
  const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n");
  return data ? JSON.parse(data) : null;
}

export async function produce(topic, record, headers) {
  const said = await send("POST", `${await v3()}/topics/${part(topic)}/records`, record, headers);
  if (said.error_code !== 200) throw new ApiError(said.error_code, said.error_code, said.message);
  return said;
}
