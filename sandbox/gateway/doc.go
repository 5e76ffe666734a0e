// Package gateway carries connections from outside to ports in sandboxes: HTTP/1.1, HTTP/2 with gRPC, WebSocket, and
// any TCP protocol by the server name of TLS. A request to {port}-{sandbox}.{domain} wakes the sandbox if it sleeps,
// waits until it runs, and goes to that port of the guest's loopback interface, over vsock. So a port is reached
// although the sandbox has no network, and although its server binds to 127.0.0.1 only.
//
// A sandbox is closed to requests without its token unless its owner opens ports (spec.Gateway). A refused request
// never wakes a sandbox. Clients and guests are both hostile.
//
// A Gateway is an http.Handler. Programs that embed it may replace how requests are routed and let in, and the bodies
// of errors: see Options.
package gateway
