// Access control: keys, access control lists and quotas, each in its own tab.

import { html, useState } from "./vendor/htm-preact.js";
import { items, part, request, requestKeys, send } from "./api.js";
import { Badge, Card, Dialog, Empty, Field, Loaded, Problem, Table, say, usePoll } from "./parts.js";
import { count, time } from "./format.js";
import { Acls } from "./access_acls.js";
import { Quotas } from "./access_quotas.js";
import { logOut } from "./login.js";

const TABS = [["keys", "Keys"], ["acls", "ACLs"], ["quotas", "Quotas"]];

export function Access({ tab, me }) {
  if (me.security !== "keys") {
    return html`<header class="page-head"><h1>Access</h1></header><${Card}>
      <${Empty} title="Security is off">Every client that reaches this port has all permissions. With <code>security=keys</code> and an <code>admin_key</code>
      every request needs a key, and access control lists define what its principal may do.<//><//>`;
  }
  return html`<header class="page-head"><h1>Access</h1>
      <div class="tools"><span class="badged"><code>${me.principal}</code>${me.is_super && html`<${Badge} kind="accent">super user<//>`}</span>
        <button type="button" onClick=${logOut}>Log out</button></div></header>
    <div class="tabs" role="tablist" aria-label="Kinds of access">${TABS.map(([id, title]) => html`
      <a key=${id} role="tab" aria-selected=${tab === id} href=${`#/access/${id}`}>${title}</a>`)}</div>
    ${tab === "keys" && html`<${Keys} />`}
    ${tab === "acls" && html`<${Acls} />`}
    ${tab === "quotas" && html`<${Quotas} />`}
    ${!TABS.some(([id]) => id === tab) && html`<${Problem} error=${{ status: 404, message: "The console does not have this page." }} />`}`;
}

const day = (atMs) => html`<span title=${time(atMs)}>${time(atMs).slice(0, 16)}</span>`;

function Keys() {
  const state = usePoll((signal) => items("tidelog/v1/keys", signal), 10000);
  const [creates, setCreates] = useState(false);
  const [gone, setGone] = useState(null);
  const remove = async () => {
    await request("DELETE", `tidelog/v1/keys/${part(gone.key_id)}`);
    say(`Key of ${gone.principal} deleted.`);
    setGone(null);
    state.again();
  };
  return html`<${Loaded} state=${state}>${(keys) => html`<${KeyList} keys=${keys} create=${() => setCreates(true)} remove=${setGone} />`}<//>
    ${creates && html`<${CreateKey} onClose=${() => { setCreates(false); state.again(); }} />`}
    ${gone && html`<${Dialog} title="Delete a key" danger submit="Delete" onClose=${() => setGone(null)} onSubmit=${remove}>
      <p>Every broker will reject this key of <strong>${gone.principal}</strong>${gone.note && html` (${gone.note})`}. Its console sessions end.</p><//>`}`;
}

function KeyList({ keys, create, remove }) {
  const button = html`<button type="button" class="primary" data-new onClick=${create}>Create key</button>`;
  if (!keys.length) {
    return html`<${Card} title="Keys" actions=${button}><${Empty} title="No keys yet">The list does not include the administrator's key of the settings.<//><//>`;
  }
  const columns = [
    { name: "Principal", of: (k) => k.principal, show: (k) => html`<span class="name">${k.principal}</span>` },
    { name: "Note", low: true, of: (k) => k.note, show: (k) => html`<span class="cut">${k.note || "–"}</span>` },
    { name: "Key", low: true, of: (k) => k.key_id, show: (k) => html`<code>${k.key_id}</code>` },
    { name: "Created", low: true, of: (k) => k.created_ms, show: (k) => day(k.created_ms) },
    { name: "Expires", of: (k) => k.expires_ms ?? Infinity, show: (k) => (k.is_expired ? html`<${Badge} kind="warn">expired<//>` : k.expires_ms ? day(k.expires_ms) : "never") },
    { name: "", right: true, show: (k) => html`<button type="button" aria-label=${`Delete key of ${k.principal}`} onClick=${() => remove(k)}>Delete</button>` },
  ];
  return html`<${Card} title="Keys" note=${`${count(keys.length)}, without the administrator's`} actions=${button} flush>
    <${Table} label="Keys" columns=${columns} rows=${keys} id=${(k) => k.key_id} /><//>`;
}

/** The secret is shown once, here. */
function CreateKey({ onClose }) {
  const [name, setName] = useState("");
  const [note, setNote] = useState("");
  const [days, setDays] = useState("");
  const [made, setMade] = useState(null);
  const [keyOf] = useState(requestKeys);
  const create = async () => {
    if (made) {
      onClose();
      return;
    }
    const body = { principal: `User:${name}`, note };
    if (days !== "") body.ttl_s = Math.max(Math.round(Number(days) * 86400), 1);
    setMade(await send("POST", "tidelog/v1/keys", body, keyOf(body)));
  };
  if (made) return html`<${Shown} made=${made} onClose=${onClose} />`;
  return html`<${Dialog} title="Create a key" submit="Create" ready=${name !== ""} onClose=${onClose} onSubmit=${create}>
    <${Field} label="Principal" note=${name ? `The principal is User:${name}; for Basic authentication, the user is ${name}.` : "A name that you choose: an app, a team, a person."}>
      <input data-first name="principal" autocomplete="off" spellcheck=${false} value=${name} onInput=${(e) => setName(e.target.value)} /><//>
    <div class="fields">
      <${Field} label="Expires after, days" note="Empty: never.">
        <input type="number" name="days" min="0" step="any" value=${days} onInput=${(e) => setDays(e.target.value)} /><//>
      <${Field} label="Note"><input name="note" maxlength="200" autocomplete="off" value=${note} onInput=${(e) => setNote(e.target.value)} /><//>
    </div>
  <//>`;
}

function Shown({ made, onClose }) {
  const copy = async () => {
    await navigator.clipboard.writeText(made.secret);
    say("Copied.");
  };
  return html`<${Dialog} key="shown" title=${`The key of ${made.principal}`} submit="Done" keeps onClose=${onClose} onSubmit=${onClose}>
    <p class="warn-text">Copy the secret now: it is not shown again. The broker stores only its SHA-256.</p>
    <${Field} label="Secret"><input name="secret" readonly spellcheck=${false} class="secret" value=${made.secret} onFocus=${(e) => e.target.select()} /><//>
    ${navigator.clipboard && html`<button type="button" onClick=${copy}>Copy</button>`}
  <//>`;
}
