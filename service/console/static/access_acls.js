// Access control lists: the operations that principals may perform on resources, in Kafka's words.

import { html, useState } from "./vendor/htm-preact.js";
import { get, request, send, v3 } from "./api.js";
import { Badge, Card, Dialog, Empty, Field, Loaded, Table, say, usePoll } from "./parts.js";
import { count } from "./format.js";

const OPERATIONS = {
  TOPIC: ["READ", "WRITE", "DESCRIBE", "CREATE", "DELETE", "ALTER", "DESCRIBE_CONFIGS", "ALTER_CONFIGS", "ALL"],
  GROUP: ["READ", "DESCRIBE", "DELETE", "ALL"],
  CLUSTER: ["DESCRIBE", "ALTER", "CREATE", "DESCRIBE_CONFIGS", "ALTER_CONFIGS", "ALL"],
};
const IMPLIED = { READ: "DESCRIBE", WRITE: "DESCRIBE", DELETE: "DESCRIBE", ALTER: "DESCRIBE", ALTER_CONFIGS: "DESCRIBE_CONFIGS" };
const FIELDS = ["resource_type", "resource_name", "pattern_type", "principal", "host", "operation", "permission"];
const fieldsOf = (acl) => Object.fromEntries(FIELDS.map((name) => [name, acl[name]]));

async function load(signal) {
  const base = `${await v3()}/acls`;
  return { base, acls: (await get(base, {}, signal)).data };
}

export function Acls() {
  const state = usePoll(load, 10000);
  const [search, setSearch] = useState("");
  const [creates, setCreates] = useState(false);
  const [gone, setGone] = useState(null);
  const remove = async () => {
    await request("DELETE", state.data.base, { query: fieldsOf(gone) });
    say("ACL removed.");
    setGone(null);
    state.again();
  };
  return html`<${Loaded} state=${state}>${({ acls }) => html`<${List} acls=${acls} search=${search} setSearch=${setSearch} create=${() => setCreates(true)} remove=${setGone} />`}<//>
    ${creates && html`<${Create} base=${state.data.base} onClose=${() => setCreates(false)} done=${() => { setCreates(false); state.again(); }} />`}
    ${gone && html`<${Dialog} title="Remove an ACL" danger submit="Remove" onClose=${() => setGone(null)} onSubmit=${remove}>
      <p>${sentence(gone)} ${gone.permission === "DENY" ? "After removal, this ACL no longer denies it." : "After removal, this is allowed only if another ACL allows it."}</p><//>`}`;
}

function List({ acls, search, setSearch, create, remove }) {
  const button = html`<button type="button" class="primary" data-new onClick=${create}>Add ACL</button>`;
  if (!acls.length) {
    return html`<${Card} title="Access control lists" actions=${button}>
      <${Empty} title="Nothing is allowed yet">Super users have all permissions. Other principals have the permissions that an ACL allows and no ACL denies.<//><//>`;
  }
  const wanted = search.trim().toLowerCase();
  const found = acls.filter((acl) => `${acl.principal} ${acl.resource_name} ${acl.operation}`.toLowerCase().includes(wanted));
  const columns = [
    { name: "Principal", of: (a) => a.principal, show: (a) => html`<span class="name">${a.principal}</span>` },
    { name: "Operation", of: (a) => `${a.operation} ${a.permission}`, show: (a) => html`<span class="badged">${a.operation}<${Badge} kind=${a.permission === "DENY" ? "warn" : "good"}>${a.permission.toLowerCase()}<//></span>` },
    { name: "On", of: (a) => `${a.resource_type} ${a.resource_name}`, show: (a) => html`<span class="wraps">${a.resource_type.toLowerCase()} ${a.resource_type !== "CLUSTER" && html`<code>${shownName(a)}</code>`}</span>` },
    { name: "From", low: true, of: (a) => a.host, show: (a) => (a.host === "*" ? "anywhere" : html`<code>${a.host}</code>`) },
    { name: "", right: true, show: (a) => html`<button type="button" aria-label=${`Remove: ${sentence(a)}`} onClick=${() => remove(a)}>Remove</button>` },
  ];
  return html`<div class="page-head"><span></span><div class="tools"><input type="search" data-search placeholder="Search  /" aria-label="Search ACLs" value=${search} onInput=${(e) => setSearch(e.target.value)} />${button}</div></div>
    <${Card} flush><${Table} label="ACLs" columns=${columns} rows=${found} id=${(a) => FIELDS.map((name) => a[name]).join("\u0000")} /><//>
    <p class="muted foot">${count(found.length)} of ${count(acls.length)} ACLs</p>`;
}

const shownName = (acl) => (acl.pattern_type === "PREFIXED" ? `${acl.resource_name}…` : acl.resource_name);

function sentence(acl) {
  const verb = acl.permission === "DENY" ? "may not" : "may";
  const what = acl.resource_type === "CLUSTER" ? "the cluster" : `${acl.resource_type.toLowerCase()} ${shownName(acl)}`;
  return `${acl.principal} ${verb} ${acl.operation} ${what}${acl.host === "*" ? "" : ` from ${acl.host}`}.`;
}

function Create({ base, onClose, done }) {
  const [acl, setAcl] = useState({ permission: "ALLOW", resource_type: "TOPIC", pattern_type: "LITERAL", resource_name: "", host: "*", who: "" });
  const [operations, setOperations] = useState(["READ"]);
  const set = (name) => (event) => setAcl({ ...acl, [name]: event.target.value });
  const isCluster = acl.resource_type === "CLUSTER";
  const possible = OPERATIONS[acl.resource_type];
  const chosen = operations.filter((one) => possible.includes(one));
  const turn = (one) => setOperations(chosen.includes(one) ? chosen.filter((other) => other !== one) : [...chosen, one]);
  const implied = [...new Set(chosen.map((one) => IMPLIED[one]).filter((one) => one && !chosen.includes(one)))];
  const act = async () => {
    const { who, ...fields } = acl;
    const made = { ...fields, principal: who.includes(":") ? who : `User:${who}` };
    if (isCluster) Object.assign(made, { resource_name: "kafka-cluster", pattern_type: "LITERAL" });
    await send("POST", `${base}:batch`, { data: chosen.map((operation) => ({ ...made, operation })) });
    say(chosen.length === 1 ? "ACL added." : `${chosen.length} ACLs added.`);
    done();
  };
  return html`<${Dialog} title="Add an ACL" submit="Add" wide ready=${acl.who && chosen.length && (isCluster || acl.resource_name)} onClose=${onClose} onSubmit=${act}>
    <div class="fields">
      <${Field} label="Principal" note="* is every principal."><input data-first name="principal" autocomplete="off" spellcheck=${false} value=${acl.who} onInput=${set("who")} /><//>
      <${Field} label="Permission"><select name="permission" value=${acl.permission} onChange=${set("permission")}>
        <option value="ALLOW">may</option><option value="DENY">may not, even if another ACL allows it</option></select><//>
      <${Field} label="From" note="* is every host."><input name="host" autocomplete="off" spellcheck=${false} value=${acl.host} onInput=${set("host")} /><//>
    </div>
    <div class="fields">
      <${Field} label="On a"><select name="type" value=${acl.resource_type} onChange=${set("resource_type")}>
        <option value="TOPIC">topic</option><option value="GROUP">consumer group</option><option value="CLUSTER">cluster</option></select><//>
      ${!isCluster && html`<${Field} label="Names that"><select name="pattern" value=${acl.pattern_type} onChange=${set("pattern_type")}>
        <option value="LITERAL">are</option><option value="PREFIXED">begin with</option></select><//>
      <${Field} label="Name" note=${acl.pattern_type === "LITERAL" ? "* is every name." : ""}><input name="name" autocomplete="off" spellcheck=${false} value=${acl.resource_name} onInput=${set("resource_name")} /><//>`}
    </div>
    <fieldset class="checks"><legend class="field-name">Operations</legend>${possible.map((one) => html`<label key=${one}>
      <input type="checkbox" checked=${chosen.includes(one)} onChange=${() => turn(one)} /> ${one}</label>`)}</fieldset>
    ${acl.permission === "ALLOW" && implied.length > 0 && html`<p class="muted">This also allows ${implied.join(" and ")}.</p>`}
  <//>`;
}
