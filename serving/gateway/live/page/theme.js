// Dark, light, or as the system has it; remembered in this browser.

import { byId } from "./dom.js";

const CHOICES = ["system", "dark", "light"];
const KEY = "slipstream-theme";

export function setUpTheme() {
  apply(remembered());
  byId("theme").addEventListener("click", () => {
    const next = CHOICES[(CHOICES.indexOf(document.documentElement.dataset.theme) + 1) % CHOICES.length];
    remember(next);
    apply(next);
  });
}

// A browser that blocks a site's data throws; then the choice lasts as long as the page.
function remembered() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

function remember(theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    return;
  }
}

function apply(stored) {
  const theme = CHOICES.includes(stored) ? stored : "system";
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
}
