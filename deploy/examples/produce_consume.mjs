// Produce and consume in JavaScript, without a library: Node.js 18 or newer, or a browser.
//
// Shows: retries that neither lose nor duplicate records (an Idempotency-Key for each request), a
// member of a consumer group that commits what it has done, its rejoin after 404, and its end.
// With `tidelog serve` in another terminal:
//
//     tidelog topics create readings --partitions 3
//     node deploy/examples/produce_consume.mjs http://127.0.0.1:8082 readings 100
//
// It produces 100 records, reads them as a member of the group `of-readings`, and prints their number.

const JSON_V2 = "application/vnd.kafka.v2+json";
const RECORDS = "application/vnd.kafka.json.v2+json";
const RETRIED = new Set([429, 502, 503, 504]);

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

/** Send a request until its outcome is known. `key` makes a repeated request count once. */
async function send(method, url, body, { type = JSON_V2, key, retryS = 60 } = {}) {
  const headers = { accept: method === "GET" ? RECORDS : "*/*", "content-type": type };
  if (key) headers["idempotency-key"] = `"${key}"`;
  for (const end = Date.now() + retryS * 1000; ; await sleep(500)) {
    try {
      const answer = await fetch(url, { method, headers, body: body && JSON.stringify(body) });
      if (!RETRIED.has(answer.status) || Date.now() > end) return answer;
    } catch (error) {
      if (Date.now() > end) throw error; // no broker has answered
    }
  }
}

class Refused extends Error {}

/** The JSON of an answer. Throws Refused. */
async function done(answer) {
  if (!answer.ok) throw new Refused(`${answer.status}: ${(await answer.json()).message}`);
  return answer.status === 204 ? null : answer.json();
}

/** Produce records `{key, value}`; return a place `{partition, offset}` for each of them. */
async function produce(server, topic, records) {
  const key = crypto.randomUUID();
  const url = `${server}/topics/${topic}`;
  return (await done(await send("POST", url, { records }, { type: RECORDS, key }))).offsets;
}

/** Join the group; return the URL of the instance. */
async function join(server, topic, group) {
  const name = crypto.randomUUID();
  const options = { name, format: "json", "auto.offset.reset": "earliest" };
  const url = `${server}/consumers/${group}`;
  const made = await send("POST", url, { ...options, "auto.commit.enable": "false" });
  if (made.status !== 409) await done(made); // 409: it was made, and the answer was lost
  const instance = `${url}/instances/${name}`;
  await done(await send("POST", `${instance}/subscription`, { topics: [topic] }));
  return instance;
}

/** The next records, or null if the instance is gone or its answer is lost. */
async function read(instance) {
  try {
    const answer = await send("GET", `${instance}/records?timeout=1000`, null, { retryS: 0 });
    if (RETRIED.has(answer.status)) {
      await sleep(500);
      return [];
    }
    return answer.status === 404 ? null : await done(answer);
  } catch (error) {
    if (error instanceof Refused) throw error;
    return null; // the instance may have passed records that we never got
  }
}

/** Call `handle` for each batch of the topic until it returns true. At least once: a batch is
 * committed after `handle`, and an instance that joins again begins at the committed offsets. */
async function consume(server, topic, group, handle) {
  let instance = await join(server, topic, group);
  for (let isDone = false; !isDone; ) {
    const records = await read(instance);
    if (records === null) {
      await send("DELETE", instance);
      instance = await join(server, topic, group);
      continue;
    }
    isDone = await handle(records);
    const committed = await send("POST", `${instance}/offsets`); // all that was returned
    // 404, 409: other members have the partitions, and get the records again.
    if (![404, 409].includes(committed.status)) await done(committed);
  }
  await send("DELETE", instance); // other members get the partitions at once
}

const [server = "http://127.0.0.1:8082", topic = "readings", count = "100"] = process.argv.slice(2);
const sent = Array.from({ length: Number(count) }, (_, n) => ({ key: `sensor-${n % 7}`, value: n }));
for (let first = 0; first < sent.length; first += 50) {
  await produce(server, topic, sent.slice(first, first + 50));
}
const seen = new Set();
await consume(server, topic, `of-${topic}`, (records) => {
  for (const { value } of records) seen.add(value);
  return seen.size >= sent.length;
});
console.log(`${seen.size} records`);
