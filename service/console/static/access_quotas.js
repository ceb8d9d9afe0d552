// Quotas: the bytes per second that a principal may produce and read, at each broker.

import { html, useState } from "./vendor/htm-preact.js";
import { items, part, request, send } from "./api.js";
import { Card, Dialog, Empty, Field, Loaded, Table, say, usePoll } from "./parts.js";
import { bytes } from "./format.js";

const DEFAULT = "<default>";
const shown = (principal) => (principal === DEFAULT ? "default" : principal);
const rate = (value) => (value === null ? "–" : `${bytes(value)}/s`);

export function Quotas() {
  const state = usePoll((signal) => items("tidelog/v1/quotas", signal), 10000);
  const [edited, setEdited] = useState(null);
  const [gone, setGone] = useState(null);
  const remove = async () => {
    await request("DELETE", `tidelog/v1/quotas/${part(gone.principal)}`);
    say(`Quotas removed: ${shown(gone.principal)}.`);
    setGone(null);
    state.again();
  };
  const fresh = { principal: "", producer_byte_rate: null, consumer_byte_rate: null };
  return html`<${Loaded} state=${state}>${(quotas) => html`<${List} quotas=${quotas} create=${() => setEdited(fresh)} edit=${setEdited} remove=${setGone} />`}<//>
    ${edited && html`<${Edit} quota=${edited} onClose=${() => setEdited(null)} done=${() => { setEdited(null); state.again(); }} />`}
    ${gone && html`<${Dialog} title="Remove quotas" danger submit="Remove" onClose=${() => setGone(null)} onSubmit=${remove}>
      <p>${gone.principal === DEFAULT ? "Principals without quotas of their own will have no limit." : `The default quotas will apply to ${gone.principal}, if they are set.`}</p><//>`}`;
}

function List({ quotas, create, edit, remove }) {
  const button = html`<button type="button" class="primary" data-new onClick=${create}>Set quotas</button>`;
  if (!quotas.length) {
    return html`<${Card} title="Quotas" actions=${button}><${Empty} title="No quotas">No principal has a limit.<//><//>`;
  }
  const columns = [
    { name: "Principal", of: (q) => q.principal, show: (q) => html`<span class="name">${shown(q.principal)}</span>` },
    { name: "Produces", right: true, of: (q) => q.producer_byte_rate ?? Infinity, show: (q) => rate(q.producer_byte_rate) },
    { name: "Reads", right: true, of: (q) => q.consumer_byte_rate ?? Infinity, show: (q) => rate(q.consumer_byte_rate) },
    { name: "", right: true, show: (q) => html`<span class="badged"><button type="button" aria-label=${`Change ${shown(q.principal)}`} onClick=${() => edit(q)}>Change</button>
      <button type="button" aria-label=${`Remove ${shown(q.principal)}`} onClick=${() => remove(q)}>Remove</button></span>` },
  ];
  return html`<${Card} title="Quotas" note="for each broker; above it, requests get 429 with Retry-After" actions=${button} flush>
    <${Table} label="Quotas" columns=${columns} rows=${quotas} id=${(q) => q.principal} /><//>`;
}

function Edit({ quota, onClose, done }) {
  const isNew = quota.principal === "";
  const [who, setWho] = useState(quota.principal);
  const [produces, setProduces] = useState(quota.producer_byte_rate ?? "");
  const [reads, setReads] = useState(quota.consumer_byte_rate ?? "");
  const number = (text) => (text === "" ? null : Number(text));
  const act = async () => {
    const principal = who === "*" ? DEFAULT : who.includes(":") || who === DEFAULT ? who : `User:${who}`;
    await send("PUT", `tidelog/v1/quotas/${part(principal)}`, { producer_byte_rate: number(produces), consumer_byte_rate: number(reads) });
    say(`Quotas set: ${shown(principal)}.`);
    done();
  };
  return html`<${Dialog} title="Set quotas" ready=${who !== ""} onClose=${onClose} onSubmit=${act}>
    ${isNew ? html`<${Field} label="Principal" note="* sets the default quotas, for principals without quotas of their own.">
      <input data-first name="principal" autocomplete="off" spellcheck=${false} value=${who} onInput=${(e) => setWho(e.target.value)} /><//>`
      : html`<p>Quotas of <strong>${shown(who)}</strong>.</p>`}
    <div class="fields">
      <${Field} label="Produce, bytes per second" note="Empty: the default applies.">
        <input type="number" name="produces" min="1" value=${produces} onInput=${(e) => setProduces(e.target.value)} /><//>
      <${Field} label="Read, bytes per second" note="Empty: the default applies.">
        <input type="number" name="reads" min="1" value=${reads} onInput=${(e) => setReads(e.target.value)} /><//>
    </div>
  <//>`;
}
