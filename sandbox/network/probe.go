package network

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/jail/confine"
	"github.com/drowse-vm/drowse/sandbox/jail/rpc"
)

// Probe confines a network process as that of a VM, has it answer, and ends it. program leads to Main with Argument
// behind it. An error says why a VM's would not be confined here.
func Probe(ctx context.Context, program ...string) (err error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	mine, its, err := rpc.Pair()
	if err != nil {
		return err
	}
	queries, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return errors.Join(os.NewSyscallError("socketpair", err), mine.Close(), its.Close())
	}
	here, there := os.NewFile(uintptr(queries[0]), "queries"), os.NewFile(uintptr(queries[1]), "queries of the network process")
	defer here.Close()
	proc, err := confine.Start(ctx, confine.Profile{Program: append(program, Argument), Files: []*os.File{its, there}, Network: true, Name: "probe"})
	if err = errors.Join(err, its.Close(), there.Close()); err != nil {
		return errors.Join(err, mine.Close())
	}
	defer func() { err = errors.Join(err, proc.Close()) }()
	conn, err := rpc.New(mine, options(func(context.Context, string, []byte, []*os.File) (any, []*os.File, error) {
		return nil, nil, errRefused
	}))
	if err != nil {
		return errors.Join(err, mine.Close())
	}
	defer conn.Close()
	order := prepareOrder{Confined: true, Policy: policyOrder{
		Policy: &netpolicy.Policy{}, Identity: netpolicy.Identity{Address4: netip.AddrFrom4([4]byte{198, 18, 0, 1})}}}
	_, err = conn.Call(ctx, callPrepare, order, nil)
	if err == nil {
		_, err = conn.Call(ctx, callStats, none{}, nil) // behind its filter
	}
	if err != nil {
		_ = proc.Kill() // it may have ended by itself, which says more
		return fmt.Errorf("the network process does not confine itself: %w", errors.Join(err, proc.Wait()))
	}
	return nil
}
