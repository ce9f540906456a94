"use strict";
// The page is complete without this script, which only shows and hides parts of it.
const all = (selector) => [...document.querySelectorAll(selector)];
const tests = all(".test");
const chips = all(".chip");
const search = document.getElementById("search");

function show() {
  const outcomes = chips.filter((chip) => chip.ariaPressed === "true").map((chip) => chip.dataset.outcome);
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const test of tests) {
    const wanted = outcomes.length === 0 || outcomes.includes(test.dataset.outcome);
    const text = words.length && wanted ? test.textContent.toLowerCase() : "";
    test.hidden = !wanted || !words.every((word) => text.includes(word));
  }
  const shown = tests.filter((test) => !test.hidden).length;
  document.getElementById("shown").textContent =
    shown === tests.length ? `${shown} tests` : `${shown} of ${tests.length} tests`;
}

// A bar of the timeline links to its test, even if the test is hidden or folded.
function follow() {
  const test = document.getElementById(location.hash.slice(1));
  if (!test) return;
  if (test.hidden) {
    chips.forEach((chip) => (chip.ariaPressed = "false"));
    search.value = "";
    show();
  }
  test.open = true;
  test.scrollIntoView({ block: "center" });
}

for (const chip of chips) {
  chip.addEventListener("click", () => {
    chip.ariaPressed = String(chip.ariaPressed !== "true");
    show();
  });
}
search.addEventListener("input", show);

// The page lists the tests in the order of their rank.
const ORDERS = {
  rank: (a, b) => a.rank - b.rank,
  seconds: (a, b) => b.seconds - a.seconds,
  began: (a, b) => a.began - b.began,
  name: (a, b) => a.name.localeCompare(b.name, "en", { numeric: true }),
};
document.getElementById("sort").addEventListener("change", (event) => {
  const order = ORDERS[event.target.value];
  tests.sort((a, b) => order(a.dataset, b.dataset) || ORDERS.rank(a.dataset, b.dataset));
  document.getElementById("tests").append(...tests);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !event.target.closest?.("input, select")) {
    event.preventDefault();
    search.focus();
  } else if (event.key === "Escape") {
    search.value = "";
    show();
  }
});
for (const button of all("button.copy")) {
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.previousElementSibling.textContent);
    button.textContent = "copied";
  });
}
document.getElementById("zoom").addEventListener("input", (event) => {
  document.querySelector(".zoomed").style.setProperty("--zoom", 2 ** event.target.value);
});
document.getElementById("theme").addEventListener("click", () => {
  const style = document.documentElement.style;
  const dark = style.colorScheme ? style.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  style.colorScheme = dark ? "light" : "dark";
});
for (const time of all("time")) time.textContent = new Date(time.dateTime).toLocaleString();
window.addEventListener("hashchange", follow);
show();
follow();
