// kafkajs makes a topic, produces plain and compressed, consumes in a group of two members, and
// administers: client.js ADDRESS. It ends with status 1 at the first thing that is wrong.
const assert = require("node:assert");
const { Kafka, CompressionTypes, logLevel } = require("kafkajs");

const topic = "kafkajs";
const groupId = "kafkajs-group";
const partitions = 4;
const each = 500;

async function produce(kafka) {
  let total = 0;
  for (const [idempotent, compression] of [
    [false, CompressionTypes.None],
    [false, CompressionTypes.GZIP],
    [true, CompressionTypes.GZIP],
  ]) {
    const producer = kafka.producer({ idempotent });
    await producer.connect();
    const messages = [...Array(each).keys()].map((n) => ({
      key: `key-${n}`,
      value: `value ${total + n}`,
      headers: { h: "v" },
    }));
    await producer.send({ topic, compression, messages, acks: -1 });
    await producer.disconnect();
    total += each;
  }
  return total;
}

async function consume(kafka, total) {
  const seen = new Set();
  let all;
  const done = new Promise((resolve) => (all = resolve));
  const members = [kafka.consumer({ groupId }), kafka.consumer({ groupId })];
  for (const member of members) {
    await member.connect();
    await member.subscribe({ topic, fromBeginning: true });
    await member.run({
      eachMessage: async ({ message }) => {
        assert.strictEqual(message.headers.h.toString(), "v");
        seen.add(message.value.toString());
        if (seen.size === total) all();
      },
    });
  }
  await done;
  for (const member of members) await member.disconnect();
}

async function administer(kafka, total) {
  const admin = kafka.admin();
  await admin.connect();
  const ends = await admin.fetchTopicOffsets(topic);
  const sum = ends.reduce((before, end) => before + Number(end.high), 0);
  assert.strictEqual(sum, total);
  const { groups } = await admin.listGroups();
  assert(groups.some((group) => group.groupId === groupId));
  const described = await admin.describeGroups([groupId]);
  assert.strictEqual(described.groups[0].state, "Empty");
  const [committed] = await admin.fetchOffsets({ groupId, topics: [topic] });
  const read = committed.partitions.reduce((before, one) => before + Number(one.offset), 0);
  assert.strictEqual(read, total);
  await admin.resetOffsets({ groupId, topic, earliest: true });
  await admin.deleteGroups([groupId]);
  const entry = { name: "retention.ms", value: "3600000" };
  const resource = { type: 2, name: topic };
  await admin.alterConfigs({ resources: [{ ...resource, configEntries: [entry] }] });
  const configs = await admin.describeConfigs({
    resources: [{ ...resource, configNames: [entry.name] }],
    includeSynonyms: false,
  });
  assert.strictEqual(configs.resources[0].configEntries[0].configValue, entry.value);
  await admin.createPartitions({ topicPartitions: [{ topic, count: partitions + 1 }] });
  const metadata = await admin.fetchTopicMetadata({ topics: [topic] });
  assert.strictEqual(metadata.topics[0].partitions.length, partitions + 1);
  await admin.deleteTopicRecords({ topic, partitions: [{ partition: 0, offset: "1" }] });
  await admin.deleteTopics({ topics: [topic] });
  await admin.disconnect();
}

async function main() {
  const kafka = new Kafka({
    clientId: "kafkajs 2.2.4",
    brokers: [process.argv[2]],
    logLevel: logLevel.NOTHING,
  });
  const admin = kafka.admin();
  await admin.connect();
  await admin.createTopics({ topics: [{ topic, numPartitions: partitions }] });
  await admin.disconnect();
  const total = await produce(kafka);
  await consume(kafka, total);
  await administer(kafka, total);
  console.log("kafkajs passed");
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
