// Package tokens keeps the bearer tokens of those who ask a host over the network: names, hashes, scopes, owners,
// expiry and rates. It knows nothing of HTTP. Several listeners share one Store, so that a token's rate holds over
// all of them.
package tokens
