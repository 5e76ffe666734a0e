// Package serial is a 16550A UART, as much of it as operating systems probe for
// and use: the guest's first console, on COM1.
//
// Output goes to the host through a bounded ring ([devices.Output]); a vCPU that
// writes a byte never waits for the host. Input comes from a bounded queue, and
// a host that offers more than fits is told so (compare CVE-2020-27174).
package serial
