// Package flow reads an endpoint's flow table, which its programs maintain, and keeps the log of its flows.
package flow
