"use strict";
const table = document.getElementById("table");
const body = table.tBodies[0];
const headings = [...table.tHead.rows[0].cells];
const keyOf = (row, column) => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
headings.forEach((heading, column) => heading.firstElementChild.addEventListener("click", () => {
  const up = heading.getAttribute("aria-sort") !== "ascending";
  headings.forEach((other) => other.setAttribute("aria-sort", "none"));
  heading.setAttribute("aria-sort", up ? "ascending" : "descending");
  const rows = [...body.rows].sort((one, other) => {
    const [first, second] = [keyOf(one, column), keyOf(other, column)];
    const [a, b] = [Number(first), Number(second)];
    const order = Number.isNaN(a) || Number.isNaN(b) ? first.localeCompare(second) : a - b;
    return up ? order : -order;
  });
  body.append(...rows);
}));
