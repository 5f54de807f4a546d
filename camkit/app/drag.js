() => {
  // Lets a visitor point into the picture: the corners of a drawn rectangle, or the place of a click, go into the hidden
  // field, as shares of width and height. Gradio's own coordinates are wrong for an enlarged picture.
  const SHORTEST = 6; // pixels of the screen; a shorter drag is a click
  let start = null, frame = null;
  const picture = () => document.querySelector("#shown img");
  const share = event => {
    const image = picture(), around = image.getBoundingClientRect();
    const scale = Math.min(around.width / image.naturalWidth, around.height / image.naturalHeight);
    const width = image.naturalWidth * scale, height = image.naturalHeight * scale;
    const inside = value => Math.min(Math.max(value, 0), 1);
    return [
      inside((event.clientX - around.left - (around.width - width) / 2) / width),
      inside((event.clientY - around.top - (around.height - height) / 2) / height),
    ];
  };
  const far = event => Math.hypot(event.clientX - start.clientX, event.clientY - start.clientY) >= SHORTEST;
  const end = () => {
    frame?.remove();
    start = frame = null;
  };
  document.addEventListener("dragstart", event => {
    if (event.target === picture()) event.preventDefault(); // the browser would carry the picture away
  });
  document.addEventListener("pointerdown", event => {
    if (event.target.closest("#shown") && event.button === 0) start = event; // also beside a rounded corner
  });
  document.addEventListener("pointermove", event => {
    if (!start || !far(event)) return;
    frame ??= document.body.appendChild(document.createElement("div"));
    const left = Math.min(start.clientX, event.clientX), top = Math.min(start.clientY, event.clientY);
    const width = Math.abs(event.clientX - start.clientX), height = Math.abs(event.clientY - start.clientY);
    frame.style.cssText = `position: fixed; z-index: 9; pointer-events: none; border: 2px solid magenta;
      left: ${left}px; top: ${top}px; width: ${width}px; height: ${height}px`;
  });
  document.addEventListener("pointerup", event => {
    if (start && (far(event) || event.target === picture())) {
      const field = document.querySelector("#pointed textarea, #pointed input");
      const places = far(event) ? [share(start), share(event)] : [share(event)];
      field.value = JSON.stringify([places, Date.now()]); // the same place again is another value
      field.dispatchEvent(new Event("input", { bubbles: true }));
    }
    end();
  });
  document.addEventListener("pointercancel", end);
}
