// What the theme leaves out for people who use a keyboard or a screen reader.
document.addEventListener("DOMContentLoaded", () => {
  for (const each of document.querySelectorAll("pre, .table-wrapper")) {
    if (each.scrollWidth > each.clientWidth) each.tabIndex = 0;
  }
  for (const each of document.querySelectorAll("th")) {
    if (!each.textContent.trim()) each.outerHTML = "<td></td>";
  }
  for (const each of document.querySelectorAll("[role=heading]")) each.ariaLevel = "2";
  for (const each of document.querySelectorAll("aside")) each.ariaLabel = each.className.includes("toc") ? "On this page" : "Pages";
  document.getElementById("search-results")?.insertAdjacentHTML("beforebegin", "<h1>Search</h1>");
});
