// The dialog that produces one record, in the v3 dialect because it has headers.

import { html, useState } from "./vendor/htm-preact.js";
import { produce } from "./api.js";
import { Dialog, Field, say } from "./parts.js";
import { count, toBase64 } from "./format.js";

const text = (value) => toBase64(new TextEncoder().encode(value));

/** Parse lines of `name: value`. */
function headersOf(lines) {
  return lines.split("\n").filter((line) => line.trim()).map((line) => {
    const at = line.indexOf(":");
    if (at < 1) throw new Error(`“${line}” is not a header: write name: value`);
    return { name: line.slice(0, at).trim(), value: text(line.slice(at + 1).trim()) };
  });
}

function hexOf(value) {
  const digits = value.replace(/\s+/g, "");
  if (!/^([0-9a-fA-F]{2})*$/.test(digits)) throw new Error("Invalid hex: write two digits per byte.");
  return toBase64(Uint8Array.from(digits.match(/../g) ?? [], (two) => parseInt(two, 16)));
}

function valueOf(value, form) {
  if (form === "null") return null;
  if (form === "hex") return { type: "BINARY", data: hexOf(value) };
  if (form === "text") return { type: "STRING", data: value };
  try {
    return { type: "JSON", data: JSON.parse(value) };
  } catch (error) {
    throw new Error(`The value is not JSON: ${error.message}`);
  }
}

export function Produce({ topic, partitions, onClose, done }) {
  const [partition, setPartition] = useState("");
  const [key, setKey] = useState("");
  const [value, setValue] = useState('{"hello": "tide"}');
  const [form, setForm] = useState("json");
  const [headers, setHeaders] = useState("");
  const act = async () => {
    const record = {};
    if (partition !== "") record.partition_id = Number(partition);
    if (key !== "") record.key = { type: "STRING", data: key };
    const made = valueOf(value, form);
    if (made) record.value = made;
    const said = headersOf(headers);
    if (said.length) record.headers = said;
    const placed = await produce(topic, record);
    say(`Committed at partition ${placed.partition_id}, offset ${count(placed.offset)}.`);
    done(placed);
  };
  return html`<${Dialog} title="Produce a record" submit="Produce" wide onClose=${onClose} onSubmit=${act}>
    <div class="fields">
      <${Field} label="Partition"><select value=${partition} onChange=${(e) => setPartition(e.target.value)}>
        <option value="">by key</option>${Array.from({ length: partitions }, (_, n) => html`<option key=${n} value=${n}>${n}</option>`)}</select><//>
      <${Field} label="Key" note="Empty: none."><input name="key" spellcheck=${false} autocomplete="off" value=${key} onInput=${(e) => setKey(e.target.value)} /><//>
      <${Field} label="Value is"><select name="form" value=${form} onChange=${(e) => setForm(e.target.value)}>
        <option value="json">JSON</option><option value="text">text</option><option value="hex">hex</option><option value="null">null (a tombstone)</option></select><//>
    </div>
    ${form !== "null" && html`<${Field} label="Value"><textarea data-first name="value" rows="8" spellcheck=${false} value=${value} onInput=${(e) => setValue(e.target.value)}></textarea><//>`}
    <${Field} label="Headers" note="One per line, name: value."><textarea name="headers" rows="2" spellcheck=${false} value=${headers} onInput=${(e) => setHeaders(e.target.value)}></textarea><//>
  <//>`;
}
