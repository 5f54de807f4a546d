"use strict";
// Judge the outlines with the keyboard. The browser remembers the choices until they are saved as a new instances.json.
const cards = [...document.querySelectorAll(".card")];
const content = JSON.parse(document.getElementById("coco").textContent);
const place = `camkit regions ${document.body.dataset.made}`;
const choices = JSON.parse(localStorage.getItem(place) ?? "{}");
const choiceOf = (card) => choices[card.dataset.id] ?? "keep";
let current = 0;

function show() {
  const counts = { keep: 0, box: 0, drop: 0 };
  cards.forEach((card, number) => {
    const choice = choiceOf(card);
    counts[choice] += 1;
    card.dataset.choice = choice;
    card.toggleAttribute("aria-current", number === current);
    card.classList.toggle("seen", card.dataset.id in choices);
    card.querySelectorAll("button").forEach((button) => button.setAttribute("aria-pressed", String(button.value === choice)));
  });
  for (const [choice, count] of Object.entries(counts)) document.getElementById(choice).textContent = count;
  const left = cards.filter((card) => !(card.dataset.id in choices)).length;
  document.getElementById("left").textContent = left ? `${left} not looked at yet` : "all looked at";
}

function go(number) {
  current = Math.min(Math.max(number, 0), cards.length - 1);
  show();
  cards[current].scrollIntoView({ block: "center" });
}

function choose(card, choice) {
  choices[card.dataset.id] = choice;
  localStorage.setItem(place, JSON.stringify(choices));
  go(cards.indexOf(card) + 1);
}

// Without an outline, the check uses the box. A dropped object becomes a crowd: the check removes it, but does not test it.
function save() {
  const annotations = content.annotations.map((made) => {
    const choice = made.from_box ? choices[made.id] ?? "keep" : "keep";
    const { segmentation, ...bare } = made;
    return choice === "keep" ? made : { ...bare, iscrowd: choice === "drop" ? 1 : 0 };
  });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify({ ...content, annotations })], { type: "application/json" }));
  link.download = "instances.json";
  link.click();
}

const columns = () => cards.filter((card) => card.offsetTop === cards[0].offsetTop).length;
const KEYS = {
  k: () => choose(cards[current], "keep"),
  b: () => choose(cards[current], "box"),
  d: () => choose(cards[current], "drop"),
  s: save,
  ArrowLeft: () => go(current - 1),
  ArrowRight: () => go(current + 1),
  ArrowUp: () => go(current - columns()),
  ArrowDown: () => go(current + columns()),
};
addEventListener("keydown", (event) => {
  const act = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!act || (!cards.length && act !== save) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act();
});
cards.forEach((card, number) => {
  card.addEventListener("click", () => { current = number; show(); });
  card.querySelectorAll("button").forEach((button) => button.addEventListener("click", (event) => {
    event.stopPropagation();
    choose(card, button.value);
    button.blur();
  }));
});
document.getElementById("save").addEventListener("click", save);
// After a reload, the first outline that nobody looked at is the current one, where the browser shows it.
history.scrollRestoration = "manual";
const next = cards.findIndex((card) => !(card.dataset.id in choices));
if (next > 0) go(next); else show();
