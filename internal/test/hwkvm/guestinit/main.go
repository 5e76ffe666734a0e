package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/internal/test/hwkvm/wire"
)

func main() {
	if filepath.Base(os.Args[0]) == wire.ModprobeArg {
		if err := modprobe(wire.StateDir+wire.ModuleDir, os.Args[1:]); err != nil {
			os.Exit(1)
		}
		return
	}
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "guestinit: this is the init program of a virtual machine made by hwkvm; do not run it elsewhere")
		os.Exit(wire.StatusRunner)
	}
	port, err := setUp()
	if err != nil {
		halt(fmt.Errorf("before the host could be reached: %w", err))
	}
	out := wire.NewWriter(port)
	in := wire.NewReader(&portReader{port})
	var result wire.Result
	if err := enterHost(); err != nil {
		result = wire.Result{Error: err.Error()}
	} else if cmd, err := in.Command(); err != nil {
		result = wire.Result{Error: err.Error()}
	} else {
		result = run(cmd, in, out)
	}
	syscall.Sync()
	if err := out.SendJSON(wire.Exit, result); err != nil {
		halt(fmt.Errorf("report the result: %w", err))
	}
	// A write to the port ends before QEMU has passed it on, and what a slow reader has not taken would go with the
	// power (port_fops_write in virtio_console.c). So the host, which kills the machine once it has the result, has the
	// first turn.
	time.Sleep(wire.ResultTaken)
	halt(nil)
}

// halt turns the machine off. A message on the console is the last thing the host sees when there is no other way.
func halt(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "hwkvm-init: "+err.Error())
	}
	syscall.Sync()
	if err := syscall.Reboot(syscall.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		fmt.Fprintln(os.Stderr, "hwkvm-init: power off:", err)
	}
	select {}
}

// portReader reads a virtio-serial port. The driver reports end of file while the host side is not connected yet, which
// is so for an instant after the driver was loaded.
type portReader struct{ f *os.File }

func (r *portReader) Read(p []byte) (int, error) {
	for {
		n, err := syscall.Read(int(r.f.Fd()), p)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			return 0, os.NewSyscallError("read", err)
		}
		if n > 0 {
			return n, nil
		}
		pause()
	}
}
