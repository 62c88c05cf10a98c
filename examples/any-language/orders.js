// The service of orders.py in Node: orders.js [PORT]

const http = require("node:http");

const orders = [];

const server = http.createServer((request, response) => {
  const respond = (status, value) => {
    response.writeHead(status, { "Content-Type": "application/json" });
    response.end(JSON.stringify(value));
  };
  if (request.method !== "POST") return respond(200, orders.length);
  let item = "";
  request.on("data", (data) => (item += data));
  request.on("end", () => {
    orders.push(item);
    if (item === "crash") return request.socket.destroy();
    respond(201, { order: orders.length, item });
  });
});

server.listen(Number(process.argv[2] ?? 3000), "127.0.0.1", () => {
  console.log(`listening on 127.0.0.1:${server.address().port}`);
});
