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

export async function request(method, path, { query, body, headers = {}, signal } = {}) {
  const sent = { method, headers: { "Tidelog-Console": "1", ...headers }, signal };
  if (body !== undefined) {
    sent.headers["Content-Type"] ??= "application/json";
    sent.body = typeof body === "string" ? body : JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(url(path, query), sent);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, 0, "The broker cannot be reached.");
  }
  if (answer.status === 401) window.dispatchEvent(new Event("tidelog-login"));
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

async function refusal(answer) {
  let said = {};
  try {
    said = await answer.json();
  } catch {
    // Not an answer of tidelog, but a proxy's page or nothing: show the status alone.
  }
  return new ApiError(answer.status, said.error_code, said.message || `HTTP ${answer.status}`);
}

/** The JSON of an answer; for a list in pages, with the items of all pages. */
export async function get(path, query, signal) {
  const found = await (await request("GET", path, { query, signal })).json();
  let next = found?.metadata?.next;
  while (next) {
    const token = new URL(next).searchParams.get("page_token");
    const page = await (await request("GET", path, { query: { ...query, page_token: token }, signal })).json();
    found.data.push(...page.data);
    next = page.metadata.next;
  }
  return found;
}

/** All items of a list. */
export const items = async (path, signal) => (await get(path, {}, signal)).data;

export async function send(method, path, body) {
  const answer = await request(method, path, { body });
  const text = await answer.text();
  return text ? JSON.parse(text) : null;
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

/** Fetch records from `offset` (or a time) on, keys and values in base64; also the next offset. */
export async function fetchRecords(topic, partition, { offset, timestamp, maxBytes, signal }) {
  const answer = await request("GET", recordsPath(topic, partition), {
    query: { offset, timestamp, max_bytes: maxBytes },
    headers: BINARY,
    signal,
  });
  const number = (name) => Number(answer.headers.get(`tidelog-${name}`));
  return {
    records: await answer.json(),
    next: number("next-offset"),
    end: number("high-watermark"),
    start: number("log-start-offset"),
  };
}

/**
 * Follow a partition by server-sent events until the signal aborts. After a lost connection,
 * resume at the next offset. Uses fetch, because an EventSource cannot send headers.
 */
export async function follow(topic, partition, { offset, signal, onRecords, onState }) {
  let from = offset;
  while (!signal.aborted) {
    try {
      const answer = await request("GET", recordsPath(topic, partition), {
        query: { offset: from, format: "binary" },
        headers: { Accept: "text/event-stream" },
        signal,
      });
      onState("live");
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
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

export async function produce(topic, record) {
  const said = await send("POST", `${await v3()}/topics/${part(topic)}/records`, record);
  if (said.error_code !== 200) throw new ApiError(said.error_code, said.error_code, said.message);
  return said;
}
