"use strict";
// The page is complete without this script, which only shows and hides parts of it.
const all = (selector) => [...document.querySelectorAll(selector)];
const list = document.getElementById("tests");
const tests = [...list.children];
const ranks = new Map(tests.map((test, rank) => [test, rank]));
const chips = all(".chip");
const filters = all(".filter");
const search = document.getElementById("search");
const nameOf = (test) => test.querySelector(".name").textContent;

function show() {
  const outcomes = chips.filter((chip) => chip.ariaPressed === "true").map((chip) => chip.dataset.outcome);
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = filters.filter((filter) => filter.value);
  for (const test of tests) {
    const wanted =
      (outcomes.length === 0 || outcomes.some((outcome) => test.classList.contains(outcome))) &&
      chosen.every((filter) => test.dataset[filter.name] === filter.value);
    const text = words.length && wanted ? test.textContent.toLowerCase() : "";
    const hidden = !wanted || !words.every((word) => text.includes(word));
    if (test.hidden !== hidden) test.hidden = hidden;
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
    filters.forEach((filter) => (filter.value = ""));
    search.value = "";
    show();
  }
  test.open = true;
  complete(test);
  test.scrollIntoView({ block: "center" });
}

for (const chip of chips) {
  chip.addEventListener("click", () => {
    chip.ariaPressed = String(chip.ariaPressed !== "true");
    show();
  });
}
search.addEventListener("input", show);
for (const filter of filters) filter.addEventListener("change", show);

// A test that is unfolded or clicked gets the command that runs it, and a button that copies it.
function complete(test) {
  let rerun = test.querySelector(".rerun");
  if (!rerun) {
    const name = nameOf(test).replace(/ \[\d+\]$/, "");
    const quoted = /^[\w@%+=:,./-]+$/.test(name) ? name : `'${name.replaceAll("'", `'"'"'`)}'`;
    rerun = document.createElement("div");
    rerun.className = "rerun";
    rerun.append(document.createElement("code"));
    rerun.firstChild.textContent = `${list.dataset.command} ${quoted}`;
    test.append(rerun);
  }
  if (rerun.children.length > 1 || !navigator.clipboard) return;
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "copy";
  rerun.append(button);
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(rerun.firstChild.textContent);
    button.textContent = "copied";
  });
}
list.addEventListener("toggle", (event) => event.target.parentNode === list && complete(event.target), true);
list.addEventListener("click", (event) => {
  const line = event.target.closest("div.test");
  if (line) complete(line);
});

// The page lists the tests in the order of their rank.
const ORDERS = {
  rank: (a, b) => ranks.get(a) - ranks.get(b),
  seconds: (a, b) => b.dataset.seconds - a.dataset.seconds,
  began: (a, b) => a.dataset.began - b.dataset.began,
  name: (a, b) => names.compare(nameOf(a), nameOf(b)),
};
const names = new Intl.Collator("en", { numeric: true });
document.getElementById("sort").addEventListener("change", (event) => {
  const order = ORDERS[event.target.value];
  tests.sort((a, b) => order(a, b) || ORDERS.rank(a, b));
  list.append(...tests);
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
// A bar of the timeline has the name of its test, its outcome and its time.
for (const link of all(".timeline a")) {
  const test = document.getElementById(link.getAttribute("href").slice(1));
  link.ariaLabel = nameOf(test);
}
document.querySelector(".timeline").addEventListener("pointerover", (event) => {
  const link = event.target.closest("a");
  if (!link || link.querySelector("title")) return;
  const test = document.getElementById(link.getAttribute("href").slice(1));
  const title = document.createElementNS(link.namespaceURI, "title");
  const told = [...test.querySelectorAll(":scope .took, :scope > .facts")].map((one) => one.textContent);
  title.textContent = [nameOf(test), ...told].join("\n");
  link.firstChild.append(title);
});
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
