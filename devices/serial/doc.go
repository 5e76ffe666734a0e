// Package serial is a 16550A UART, with the parts that operating systems probe for and use. It is the guest's
// first console, on COM1.
//
// Output goes to the host through a bounded ring ([devices.Output]), so a vCPU that writes a byte never waits for
// the host. The only input is looped-back output, in a bounded queue (compare CVE-2020-27174).
package serial
