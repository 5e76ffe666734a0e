// Package fleettest has the tests that sandboxes of real VMs, of VMs in memory and over HTTP all have to pass.
package fleettest
