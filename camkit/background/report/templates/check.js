"use strict";
// Sort the table by the column whose heading is clicked; a second click reverses the order.
const table = document.getElementById("table");
const body = table.tBodies[0];
const headings = [...table.tHead.rows[0].cells];
const keyOf = (row, column) => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();

function compare(first, second) {
  const [a, b] = [Number(first), Number(second)];
  return Number.isNaN(a) || Number.isNaN(b) ? first.localeCompare(second) : a - b;
}

headings.forEach((heading, column) => heading.firstElementChild.addEventListener("click", () => {
  const ascending = heading.getAttribute("aria-sort") !== "ascending";
  headings.forEach((other) => other.setAttribute("aria-sort", "none"));
  heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const rows = [...body.rows].sort((one, other) => {
    const order = compare(keyOf(one, column), keyOf(other, column));
    return ascending ? order : -order;
  });
  body.append(...rows);
}));

// Folded parts must be on paper too.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));

// A link into a folded part opens it.
document.querySelectorAll('a[href^="#"]').forEach((link) => link.addEventListener("click", () => {
  const part = document.querySelector(link.hash)?.closest("details");
  if (part) part.open = true;
}));
