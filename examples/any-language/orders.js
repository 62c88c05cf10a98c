// The service of orders.py in Node: orders.js [PORT]

const { isUtf8 } = require("node:buffer");
const http = require("node:http");

const paths = ["/orders", "/orders/rush"];
const orders = [];

const server = http.createServer((request, response) => {
  const respond = (status, value) => {
    response.writeHead(status, { "Content-Type": "application/json" });
    response.end(JSON.stringify(value));
  };
  if (!["POST", "PATCH"].includes(request.method)) return respond(200, orders.length);
  if (!paths.includes(request.url.split("?")[0])) return respond(404, "unknown path");
  const parts = [];
  request.on("data", (part) => parts.push(part));
  request.on("end", () => {
    // The body is decoded as a whole, because a character may be split between two parts.
    const body = Buffer.concat(parts);
    if (!isUtf8(body)) return respond(400, "expected text");
    const item = body.toString();
    orders.push(item);
    if (item === "crash") return request.socket.destroy();
    respond(201, { order: orders.length, item });
  });
});

server.listen(Number(process.argv[2] ?? 3000), "127.0.0.1", () => {
  console.log(`listening on 127.0.0.1:${server.address().port}`);
});
