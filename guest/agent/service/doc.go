// Package service keeps programs running in the guest: it starts them again, checks whether they work, keeps their
// logs, and tells the host what becomes of them.
package service
