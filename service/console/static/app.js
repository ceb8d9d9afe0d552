// The console's shell: the page of the address, navigation, keyboard shortcuts, the theme.
//
// Preact with htm instead of plain DOM code: pages are redrawn every few seconds while a user
// types, sorts and scrolls in them. A diff of trees keeps that input intact. Neither needs a build
// step.

import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { get } from "./api.js";
import { Login, LoginAgain, logOut } from "./login.js";
import { Guard, Messages, Problem } from "./parts.js";
import { Shortcuts } from "./keys.js";
import { Overview } from "./page_overview.js";
import { Topics } from "./page_topics.js";
import { Topic } from "./page_topic.js";
import { Groups } from "./page_groups.js";
import { Group } from "./page_group.js";
import { Defaults } from "./page_defaults.js";
import { Clients } from "./page_clients.js";
import { Metadata } from "./page_metadata.js";
import { Access } from "./page_access.js";
import { Api } from "./page_api.js";

const PAGES = [
  ["overview", "Overview", "o"],
  ["topics", "Topics", "t"],
  ["groups", "Groups", "g"],
  ["clients", "Clients", "c"],
  ["metadata", "Metadata", "m"],
  ["access", "Access", "a"],
];

/** Parse the address: `#/topics/name/records?p=0` is page topics, its parts and a query. */
function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [page = "", ...parts] = path.split("/").map((one) => {
    try {
      return decodeURIComponent(one);
    } catch {
      return one;
    }
  });
  return { page: page || "overview", parts, query: new URLSearchParams(query) };
}

function Page({ at, me }) {
  const [name, tab] = at.parts;
  if (at.page === "overview") return html`<${Overview} />`;
  if (at.page === "topics" && !name) return html`<${Topics} query=${at.query} />`;
  if (at.page === "topics") return html`<${Topic} key=${name} name=${name} tab=${tab || "picture"} query=${at.query} />`;
  if (at.page === "defaults") return html`<${Defaults} />`;
  if (at.page === "groups" && !name) return html`<${Groups} />`;
  if (at.page === "groups") return html`<${Group} key=${name} name=${name} />`;
  if (at.page === "clients") return html`<${Clients} />`;
  if (at.page === "metadata") return html`<${Metadata} />`;
  if (at.page === "api") return html`<${Api} query=${at.query} />`;
  if (at.page === "access") return html`<${Access} tab=${name || "keys"} me=${me} />`;
  return html`<${Problem} error=${{ status: 404, message: "The console does not have this page." }} />`;
}

const THEMES = { system: "System", light: "Light", dark: "Dark" };

function ThemeToggle() {
  const [theme, setTheme] = useState(document.documentElement.dataset.theme || "system");
  const next = { system: "light", light: "dark", dark: "system" }[theme];
  const turn = () => {
    if (next === "system") {
      delete document.documentElement.dataset.theme;
      localStorage.removeItem("tidelog.theme");
    } else {
      document.documentElement.dataset.theme = next;
      localStorage.setItem("tidelog.theme", next);
    }
    setTheme(next);
    window.dispatchEvent(new Event("tidelog-theme"));
  };
  return html`<button type="button" class="quiet theme" onClick=${turn} title="Change the theme"
    aria-label=${`Theme: ${THEMES[theme]}`}><span aria-hidden="true">◐</span> ${THEMES[theme]}</button>`;
}

/** Return the user, or `unknown` if the broker does not answer; then each page shows the error. */
async function whoAmI() {
  try {
    return await get("tidelog/v1/me");
  } catch (error) {
    return { security: error.status === 401 ? "login" : "unknown", principal: "" };
  }
}

function App() {
  const [at, setAt] = useState(place());
  const [helps, setHelps] = useState(false);
  const [me, setMe] = useState(null);
  const [isEnded, setEnded] = useState(false);
  const known = useRef(null);
  known.current = me;
  useEffect(() => {
    const out = () => {
      setEnded(false);
      setMe({ security: "login", principal: "" });
    };
    // If a session ends, the page stays below the login, with everything that the user typed in it.
    const asked = () => (known.current?.security === "keys" ? setEnded(true) : out());
    window.addEventListener("tidelog-login", asked);
    window.addEventListener("tidelog-logout", out);
    whoAmI().then(setMe);
    return () => {
      window.removeEventListener("tidelog-login", asked);
      window.removeEventListener("tidelog-logout", out);
    };
  }, []);
  const returned = (said) => {
    setEnded(false);
    setMe(said);
    window.dispatchEvent(new Event("tidelog-again"));
  };
  // Without the right to describe the cluster, start at the topics: never show the overview.
  const isLed = me?.security === "keys" && !location.hash && !me.operations.includes("DESCRIBE");
  useEffect(() => {
    if (isLed) location.hash = "#/topics";
  }, [isLed]);
  useEffect(() => {
    const moved = () => setAt(place());
    window.addEventListener("hashchange", moved);
    return () => window.removeEventListener("hashchange", moved);
  }, []);
  useEffect(() => {
    const page = PAGES.find(([id]) => id === at.page)?.[1] ?? (at.page === "api" ? "API" : at.page);
    document.title = [at.parts[0], page, "tidelog"].filter(Boolean).join(" · ");
    window.scrollTo(0, 0);
  }, [at.page, at.parts[0]]);
  if (me === null) return null;
  if (me.security === "login") return html`<${Login} onDone=${setMe} /><${Messages} />`;
  if (isLed) return null;
  return html`
    <a class="skip" href="#main" onClick=${(e) => { e.preventDefault(); document.getElementById("main").focus(); }}>Skip to content</a>
    <nav class="side" aria-label="Pages">
      <a class="brand" href="#/overview"><img src="icon.svg" alt="" width="22" height="22" /><span>tidelog</span></a>
      <ul>${PAGES.map(([id, name]) => html`<li key=${id}>
        <a href=${`#/${id}`} aria-current=${at.page === id ? "page" : undefined}>${name}</a></li>`)}</ul>
      <div class="side-foot">
        <${ThemeToggle} />
        <button type="button" class="quiet only-wide" onClick=${() => setHelps(true)}>Keys <kbd>?</kbd></button>
        <a class="quiet only-wide" href="#/api" aria-current=${at.page === "api" ? "page" : undefined}>API reference</a>
        ${me.security === "keys" && html`<button type="button" class="quiet only-wide" title=${`Log out ${me.principal}`} onClick=${logOut}>Log out</button>`}
      </div>
    </nav>
    <main id="main" tabindex="-1" data-place=${[at.page, ...at.parts].join("/")}>
      <${Guard} what="page" key=${[me.principal, at.page, ...at.parts].join("/")}><${Page} at=${at} me=${me} /><//></main>
    <${Shortcuts} pages=${PAGES} helps=${helps} setHelps=${setHelps} />
    ${isEnded && html`<${LoginAgain} me=${me} onDone=${returned} />`}
    <${Messages} />`;
}

render(html`<${App} />`, document.getElementById("app"));
