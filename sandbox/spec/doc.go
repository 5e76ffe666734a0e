// Package spec says what a VM is: its image, size, disk, network and policy, services, volumes and shares, what its
// guest may ask of the host, and when it goes to sleep. It checks what is said and fills in what is not. It knows
// neither files nor KVM, so that a client on another system has it as well.
package spec
