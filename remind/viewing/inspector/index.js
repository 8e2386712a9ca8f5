const rows = [...document.querySelectorAll("tbody tr")];
byId("find").addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
  let left = 0;
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
    left += row.hidden ? 0 : 1;
  }
  byId("found").textContent = words.length ? `${left} of ${rows.length}` : "";
});
document.documentElement.dataset.ready = "true";
