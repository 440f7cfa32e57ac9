// Shows the values under the pointer. Every curve is in the page without this.
"use strict";
for (const plot of document.querySelectorAll(".plot")) {
  const source = plot.querySelector("script");
  if (!source) continue;
  let parts = null;
  const make = () => {
    const data = JSON.parse(source.textContent);
    const add = (name) => plot.appendChild(Object.assign(document.createElement("div"), { className: name }));
    const spots = data.series.map((item) => add(`spot swatch c${item.colour}`));
    return { data, cursor: add("cursor"), tip: add("tip"), spots };
  };
  const nearest = (steps, step) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle; else high = middle;
    }
    return step - steps[low] <= steps[high] - step ? low : high;
  };
  const hide = () => {
    if (parts) for (const item of [parts.cursor, parts.tip, ...parts.spots]) item.style.display = "none";
  };
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("pointermove", (event) => {
    parts = parts || make();
    const { data, cursor, tip, spots } = parts;
    const frame = plot.querySelector(".frame").getBoundingClientRect(), around = plot.getBoundingClientRect();
    const share = Math.min(Math.max((event.clientX - frame.left) / frame.width, 0), 1);
    const wanted = data.left + share * (data.right - data.left);
    const found = data.series.map((item) => nearest(item.x, wanted));
    const steps = data.series.map((item, index) => item.x[found[index]]);
    const step = steps.reduce((best, one) => Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best);
    const place = (at) => frame.left - around.left + frame.width * (data.right > data.left ? (at - data.left) / (data.right - data.left) : 0.5);
    tip.textContent = `${data.x} ${step.toLocaleString("en")}`;
    data.series.forEach((item, index) => {
      const line = document.createElement("div"), at = found[index], swatch = document.createElement("i");
      swatch.className = `swatch c${item.colour}`;
      line.append(swatch, `${item.name}  ${item.y[at]}`);
      tip.append(line);
      const spot = spots[index];
      spot.style.display = item.t[at] === null ? "none" : "block";
      spot.style.left = `${place(item.x[at])}px`;
      spot.style.top = `${frame.top - around.top + frame.height * (item.t[at] || 0)}px`;
    });
    const left = place(step);
    cursor.style.left = `${left}px`;
    cursor.style.display = tip.style.display = "block";
    const right = left + tip.offsetWidth + 14 > around.width;
    tip.style.left = `${right ? Math.max(left - tip.offsetWidth - 10, 0) : left + 10}px`;
  });
}
