// Opens pages of `moereplay report` and of the site in a headless Chromium that has no network, and fails where one is not
// as it should be: node check.mjs CHROMIUM OUT PAGE.html ...
//
// Of each page: no request but of files, no error on the console, no sideways scrolling, no violation that axe finds (wide
// and narrow, light and dark). Of a report: no request at all; points, rows, the list and zoom work by mouse or by keyboard
// alone. The site's search finds a word. Screenshots of each, and a PDF of a report, go to OUT, to be looked at.
import { createRequire } from "node:module";
import { mkdirSync, readFileSync } from "node:fs";
import { relative, resolve } from "node:path";
import { pathToFileURL } from "node:url";
import puppeteer from "puppeteer-core";

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const [chromium, out, ...pages] = process.argv.slice(2);
const WIDTHS = [1280, 390];
let failures = 0;

const expect = (holds, what) => {
  if (!holds) failures += 1;
  console.log(`  ${holds ? "ok  " : "FAIL"} ${what}`);
};

const opened = async (browser, path, width, scheme) => {
  const page = await browser.newPage();
  const seen = { requests: [], errors: [] };
  await page.setViewport({ width, height: 900 });
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
  await page.setOfflineMode(true);
  page.on("request", (request) => {
    if (!request.url().startsWith("data:")) seen.requests.push(request.url());
  });
  page.on("console", (message) => ["error", "warn"].includes(message.type()) && seen.errors.push(message.text()));
  page.on("pageerror", (error) => seen.errors.push(String(error)));
  const began = performance.now();
  await page.goto(pathToFileURL(resolve(path)).href, { waitUntil: "load" });
  seen.loaded = Math.round(performance.now() - began);
  await drawAll(page);
  return { page, seen };
};

// Figures are drawn when they come near the window.
const drawAll = async (page) => {
  const plots = await page.$$(".plot");
  for (const plot of plots) {
    await plot.evaluate((each) => each.scrollIntoView({ block: "center" }));
    await page.waitForFunction((each) => each.querySelector(".live svg"), { timeout: 20000 }, plot);
  }
  await page.evaluate(() => scrollTo(0, 0));
  await new Promise((done) => setTimeout(done, 300));
};

const violations = async (page) => {
  await page.evaluate(axe);
  const found = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
  for (const each of found.violations) console.log(`       axe ${each.impact} ${each.id}: ${each.nodes.length} × ${each.nodes[0].html.slice(0, 120)}`);
  return found.violations.length;
};

const asIs = async (browser, path, name) => {
  for (const scheme of ["light", "dark"]) {
    for (const width of WIDTHS) {
      const { page, seen } = await opened(browser, path, width, scheme);
      const [scrolled, room] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
      const cut = await page.$$eval(".live svg", (all) => all.filter((each) => each.getBoundingClientRect().right > innerWidth + 1).length);
      const own = (await isReport(page)) ? 1 : seen.requests.filter((url) => url.startsWith("file:")).length;
      expect(seen.requests.length === own, `${scheme} ${width}: ${own} files, no other request (${seen.requests.length}); loaded in ${seen.loaded} ms`);
      expect(seen.errors.length === 0, `${scheme} ${width}: nothing on the console ${seen.errors.join("; ").slice(0, 400)}`);
      expect(scrolled <= room, `${scheme} ${width}: no sideways scrolling (${scrolled} of ${room} px)`);
      expect(cut === 0, `${scheme} ${width}: figures fit`);
      expect((await violations(page)) === 0, `${scheme} ${width}: axe finds nothing`);
      if (scheme === "light" || width === WIDTHS[0]) await page.screenshot({ path: `${out}/${name}-${scheme}-${width}.png`, fullPage: true });
      await page.close();
    }
  }
};

const isReport = (page) => page.evaluate(() => document.getElementById("moereplay-data") !== null);

const searches = async (page) => {
  await page.type("input[name=q]", "belady");
  await page.keyboard.press("Enter");
  await page.waitForSelector("#search-results li a", { timeout: 20000 });
  expect((await page.$$("#search-results li a")).length > 5, "the search finds pages about a word");
};

const commandOf = (page, box) => page.$eval(`${box} pre`, (each) => each.textContent);

const byMouse = async (page) => {
  const target = await page.evaluateHandle(() => {
    const points = [...document.querySelectorAll(".live .mark-symbol path")];
    return points.find((each) => each.__data__ && each.__data__.datum && each.__data__.datum.identity);
  });
  const identity = await target.evaluate((each) => each && each.__data__.datum.identity);
  if (!identity) return expect(false, "a point has the identity of its run");
  await target.evaluate((each) => each.scrollIntoView({ block: "center" }));
  await new Promise((done) => setTimeout(done, 300));
  const at = await target.evaluate((each) => {
    const { x, y, width, height } = each.getBoundingClientRect();
    return { x: x + width / 2, y: y + height / 2 };
  });
  await page.mouse.move(at.x, at.y);
  await new Promise((done) => setTimeout(done, 100));
  expect(await page.$eval(".tip", (each) => !each.hidden && each.textContent.includes("hit rate")), "hovering over a point shows its figures");
  await page.mouse.click(at.x, at.y);
  await new Promise((done) => setTimeout(done, 200));
  const command = await commandOf(page, ".picked-here:not(:empty)");
  const known = await page.evaluate(() => JSON.parse(document.getElementById("moereplay-data").textContent).runs.map((run) => run.command));
  expect(known.includes(command), `clicking a point shows the command of its run: ${command.slice(0, 60)} ...`);
};

const byKeyboard = async (page) => {
  const reached = new Set();
  await page.evaluate(() => document.body.focus());
  const wanted = await page.$$eval("a[href], button, select, summary, [tabindex='0']", (all) => {
    const shown = all.filter((each) => each.checkVisibility());
    shown.forEach((each, at) => (each.dataset.check = at));
    return shown.length;
  });
  for (let at = 0; at < wanted + 50; at += 1) {
    await page.keyboard.press("Tab");
    reached.add(await page.evaluate(() => document.activeElement.dataset.check ?? ""));
  }
  reached.delete("");
  expect(reached.size === wanted, `Tab reaches ${reached.size} of ${wanted} interactive elements`);
  const before = await commandOf(page, "#about");
  await page.focus("#chosen");
  await page.keyboard.press("ArrowDown");
  await new Promise((done) => setTimeout(done, 100));
  const last = await page.$eval("#chosen", (each) => each.options.length === 1);
  expect(last || (await commandOf(page, "#about")) !== before, "the list of configurations changes what is shown");
  await page.focus("button[data-show]");
  await page.keyboard.press("Enter");
  expect(await page.evaluate(() => document.activeElement.id === "one"), "a row's button leads to its configuration");
};

const zoom = async (page) => {
  const ticks = () => page.$$eval(".live", ([first]) => [...first.querySelectorAll(".role-axis-label text")].map((each) => each.textContent).sort().join());
  const before = await ticks();
  for (const how of ["in", "all"]) {
    await page.focus(`button[data-zoom='${how}']`);
    await page.keyboard.press("Enter");
    await new Promise((done) => setTimeout(done, 200));
    const now = await ticks();
    expect(how === "all" ? now === before : now !== before, how === "all" ? "and shows all again" : "zoom changes the axes");
  }
};

const printed = async (browser, path, name) => {
  const { page } = await opened(browser, path, 1280, "light");
  await page.pdf({ path: `${out}/${name}.pdf`, format: "A4", margin: { top: "15mm", bottom: "15mm", left: "15mm", right: "15mm" } });
  await page.close();
};

mkdirSync(out, { recursive: true });
const browser = await puppeteer.launch({ executablePath: chromium, args: ["--no-sandbox", "--disable-dev-shm-usage"] });
console.log(await browser.version());
for (const path of pages) {
  const name = relative(".", path).replace(/^(\.\.\/)+|\.html$/g, "").replaceAll("/", "-");
  console.log(path);
  await asIs(browser, path, name);
  const { page } = await opened(browser, path, 1280, "light");
  if (!(await isReport(page))) {
    if (path.endsWith("search.html")) await searches(page);
    await page.close();
    continue;
  }
  if (await page.$("#chosen")) {
    await byMouse(page);
    await byKeyboard(page);
  }
  await zoom(page);
  await page.close();
  await printed(browser, path, name);
}
await browser.close();
console.log(failures ? `${failures} failed` : "all hold");
process.exit(failures ? 1 : 0);
