package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
)

// vmName returns a name for a VM of this process alone. parts distinguish VMs of one process.
func vmName(parts ...int) string {
	name := "bench-" + strconv.Itoa(os.Getpid())
	for _, p := range parts {
		name += "-" + strconv.Itoa(p)
	}
	return name
}

// boot boots a VM. After an error there is nothing to remove.
func (e Env) boot(ctx context.Context, name string, mib int) error {
	_, err := e.bootSpec(ctx, sandbox.Spec{Name: name, MemoryMiB: mib})
	return err
}

// bootSpec is boot with a full spec. It returns the report of the VM's process.
func (e Env) bootSpec(ctx context.Context, spec sandbox.Spec) (control.Report, error) {
	e.say("booting a guest of %d MiB", spec.MemoryMiB)
	spec.Image, spec.Kernel = e.Image, e.Kernel
	var rep control.Report
	_, err := e.Store.With(e.Launcher).Create(ctx, spec, sandbox.CreateOptions{Boot: true, Report: &rep})
	return rep, err
}

// remove removes a VM, running or not, even when the context has ended.
func (e Env) remove(ctx context.Context, name string) error {
	return e.Store.Sandbox(name).Delete(context.WithoutCancel(ctx), sandbox.DeleteOptions{Force: true})
}

// started boots a VM and starts a python3 program in it. After an error it has removed the VM. Otherwise the
// caller removes it.
func (e Env) started(ctx context.Context, name string, mib int, file, program string) error {
	if err := e.boot(ctx, name, mib); err != nil {
		return err
	}
	if err := e.startProgram(ctx, name, file, program); err != nil {
		return errors.Join(err, e.remove(ctx, name))
	}
	return nil
}

// answering is the end of a python3 program in a guest. It passes each line of words to its function answer, at
// programPort of its vsock, and returns the result or the error.
const answering = `
import socket
server = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
server.bind((socket.VMADDR_CID_ANY, 5001))
server.listen(1)
while True:
    c, _ = server.accept()
    with c:
        try:
            said = answer(*c.recv(128).decode().split())
        except OSError as e:
            said = 'error: %s' % e
        c.send(said.encode() + b'\n')
`

const programPort = 5001

// dirtied starts a VM in which dirtier has changed memory once, by each amount in MiB up to half of its RAM. It
// returns these amounts. After an error it has removed the VM. Otherwise the caller removes it.
func (e Env) dirtied(ctx context.Context, name string, mib int, dirtyMiB []int) (amounts []int, err error) {
	if err := e.started(ctx, name, mib, "dirtier.py", dirtier); err != nil {
		return nil, err
	}
	for _, d := range dirtyMiB {
		if d > mib/2 {
			continue
		}
		amounts = append(amounts, d)
		e.say("filling %d MiB of the guest's memory", d)
		if err := e.dirty(ctx, name, d); err != nil {
			return nil, errors.Join(err, e.remove(ctx, name))
		}
	}
	return amounts, nil
}

// ofSizes returns the rows of all sizes of RAM, one after another.
func ofSizes(sizes []int, measure func(mib int) ([]Row, error)) (rows []Row, err error) {
	for _, mib := range sizes {
		some, err := measure(mib)
		if err != nil {
			return nil, err
		}
		rows = append(rows, some...)
	}
	return rows, nil
}

// runsDir makes a directory for files that runs leave for the next run.
func runsDir() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "drowse-bench-"); err != nil {
		return "", fmt.Errorf("making a directory for the runs: %w", err)
	}
	return dir, nil
}
