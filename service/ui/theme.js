// The theme, before anything is drawn: the system's, or what was chosen here.
"use strict";
(() => {
  const held = localStorage.getItem("tidelog.theme");
  if (held === "light" || held === "dark") document.documentElement.dataset.theme = held;
})();
