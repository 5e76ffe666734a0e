// Package early is what the agent does as PID 1 before it serves: it brings a
// bare kernel to a root file system with the usual mounts, a hostname and a
// network, with the fewest system calls.
//
// The kernel starts it either from a small read-only root disk or from an
// initramfs. The kernel command line tells it what to do:
//
//	drowse.image=DEV        the EROFS image, lower layer of the root
//	drowse.rw=DEV           an ext4 disk that holds the upper layer; without
//	                        it the upper layer is a tmpfs and ends with the VM
//	drowse.hostname=NAME
//	drowse.ip=ADDR/PREFIX[,GATEWAY[,DNS...]]   for eth0
//	drowse.ip6=ADDR/PREFIX[,GATEWAY]           the same for IPv6
//	drowse.wait=SECONDS     how long to wait for the disks; 10 by default
//	drowse.volume=SERIAL,rw|ro,DIR             mounts a further disk with an ext4
//	drowse.share=TAG,rw|ro,DIR                 mounts a directory of the host's, by virtiofs
//	drowse.tmp=tmpfs        keep /tmp in memory rather than on the root
//	drowse.quiet            say nothing when all goes well
package early
