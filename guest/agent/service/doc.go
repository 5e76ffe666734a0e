// Package service keeps programs running in the guest: it restarts them, checks whether they work, keeps their logs,
// and reports their events to the host.
package service
