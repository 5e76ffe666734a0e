// Holds a package in memory, and counts how often it was asked.
const probe = require('drowse-probe');
let n = 0;
require('net').createServer((s) => {
  s.on('error', () => {});
  s.on('data', () => { n++; s.write(`${process.pid} ${probe.version()} ${n}\n`); });
}).listen(Number(process.argv[2]), '127.0.0.1');
