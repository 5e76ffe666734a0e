// Package spec describes a VM: its image, size, disk, network and policy, services, volumes and shares, what its
// guest may ask of the host, and when it goes to sleep. It checks a description and fills in the defaults. It uses
// neither files nor KVM, so clients on other systems can use it.
package spec
