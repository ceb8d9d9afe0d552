// The dialog that produces one record, in the v3 dialect because it has headers. The record has
// exactly the bytes that the user typed: JSON is checked here, but sent as the typed text.

import { html, useState } from "./vendor/htm-preact.js";
import { produce, requestKeys } from "./api.js";
import { Dialog, Field, say } from "./parts.js";
import { count, toBase64 } from "./format.js";

const FORMS = { json: "JSON", text: "text", hex: "hex" };
const base64 = (text) => toBase64(new TextEncoder().encode(text));

function hexOf(digits) {
  const packed = digits.replace(/\s+/g, "");
  if (!/^([0-9a-fA-F]{2})*$/.test(packed)) throw new Error("Invalid hex: write two digits per byte.");
  return toBase64(Uint8Array.from(packed.match(/../g) ?? [], (two) => parseInt(two, 16)));
}

/** Return the key or value of a record, in v3's form. */
function dataOf(name, typed, form) {
  if (form === "hex") return { type: "BINARY", data: hexOf(typed) };
  if (form === "json") {
    try {
      JSON.parse(typed);
    } catch (error) {
      throw new Error(`The ${name} is not JSON: ${error.message}`);
    }
  }
  return { type: "STRING", data: typed };
}

export function Produce({ topic, partitions, onClose, done }) {
  const [keyOf] = useState(requestKeys);
  const [partition, setPartition] = useState("");
  const [key, setKey] = useState("");
  const [keyForm, setKeyForm] = useState("none");
  const [value, setValue] = useState("");
  const [form, setForm] = useState("json");
  const [headers, setHeaders] = useState([]);
  const typeKey = (text) => {
    setKey(text);
    if (keyForm === "none") setKeyForm("text");
  };
  const setHeader = (at, changed) => setHeaders(headers.map((one, n) => (n === at ? { ...one, ...changed } : one)));
  const act = async () => {
    const record = {};
    if (partition !== "") record.partition_id = Number(partition);
    if (keyForm !== "none") record.key = dataOf("key", key, keyForm);
    if (form !== "null") record.value = dataOf("value", value, form);
    if (headers.length) record.headers = headers.map((one) => ({ name: one.name, value: base64(one.value) }));
    const placed = await produce(topic, record, keyOf([topic, record]));
    say(`Committed at partition ${placed.partition_id}, offset ${count(placed.offset)}.`);
    done(placed);
  };
  const options = Object.entries(FORMS).map(([id, name]) => html`<option key=${id} value=${id}>${name}</option>`);
  return html`<${Dialog} title="Produce a record" submit="Produce" wide byCtrlEnter onClose=${onClose} onSubmit=${act}>
    <div class="fields">
      <${Field} label="Partition"><select value=${partition} onChange=${(e) => setPartition(e.target.value)}>
        <option value="">by key</option>${Array.from({ length: partitions }, (_, n) => html`<option key=${n} value=${n}>${n}</option>`)}</select><//>
      <${Field} label="Key is"><select name="key-form" value=${keyForm} onChange=${(e) => setKeyForm(e.target.value)}>
        <option value="none">none</option>${options}</select><//>
      <${Field} label="Value is"><select name="form" value=${form} onChange=${(e) => setForm(e.target.value)}>
        ${options}<option value="null">null (a tombstone)</option></select><//>
    </div>
    <${Field} label="Key"><input name="key" spellcheck=${false} autocomplete="off" value=${keyForm === "none" ? "" : key} onInput=${(e) => typeKey(e.target.value)} /><//>
    ${form !== "null" && html`<${Field} label="Value"><textarea data-first name="value" rows="8" spellcheck=${false} value=${value} onInput=${(e) => setValue(e.target.value)}></textarea><//>`}
    ${headers.map((one, at) => html`<div class="fields" key=${at}>
      <${Field} label="Header name"><input name="header-name" spellcheck=${false} autocomplete="off" value=${one.name} onInput=${(e) => setHeader(at, { name: e.target.value })} /><//>
      <${Field} label="Header value"><input name="header-value" spellcheck=${false} autocomplete="off" value=${one.value} onInput=${(e) => setHeader(at, { value: e.target.value })} /><//>
    </div>`)}
    <div class="line">
      <div class="actions"><button type="button" onClick=${() => setHeaders([...headers, { name: "", value: "" }])}>Add header</button>
        ${headers.length > 0 && html`<button type="button" onClick=${() => setHeaders(headers.slice(0, -1))}>Remove header</button>`}</div>
      <span class="muted">Ctrl + Enter produces the record.</span></div>
  <//>`;
}
