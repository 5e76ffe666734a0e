// Command drowse-peer-guest is the first process in guests of the other monitors that drowse is compared with, and one
// of many in drowse's own: see `drowse bench resume_answer --peer`. It only answers, and it is small: the peer has to
// load all memory that it uses.
package main

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// peerPort is the first port of the first virtio-serial device (virtio 1.2, section 5.3): the console, number 0,
// does not exist.
const peerPort = "/dev/vport0p1"

// ready is the byte that it writes once its memory is filled: bench.PeerReady.
const ready = 'R'

// portWait bounds how long a guest waits for its port: the driver learns of the port some time after it finds the
// device.
const portWait = 10 * time.Minute

func main() {
	used := flag.Int("used", 0, "memory to keep in use, in MiB")
	vsock := flag.Uint("vsock", 0, "port of vsock to answer at, instead of a virtio-serial port")
	flag.Parse()
	err := fmt.Errorf("%q is one argument too many", flag.Arg(0))
	if flag.NArg() == 0 {
		err = serve(*used, uint32(*vsock))
	}
	// When PID 1 exits, the kernel panics and reports that on its console.
	fmt.Fprintln(os.Stderr, "drowse-peer-guest:", err)
	os.Exit(1)
}

// serve keeps usedMiB of memory in use, writes ready to its port, and then answers each byte with the same byte.
// With a vsock port it does so for each connection to that port. It returns only with an error. Without one it runs
// only as PID 1.
//
// It blocks in read(2) and not in Go's poller, so that an answer costs two system calls.
func serve(usedMiB int, vsockPort uint32) error {
	first := os.Getpid() == 1
	switch {
	case usedMiB < 0 || usedMiB > 1<<20:
		return fmt.Errorf("%d MiB cannot be used", usedMiB)
	case !first && vsockPort == 0:
		return errors.New("this is the first process of a guest, or one with --vsock")
	case first:
		if err := os.MkdirAll("/dev", 0o755); err != nil {
			return fmt.Errorf("making /dev: %w", err)
		}
		if err := unix.Mount("devtmpfs", "/dev", "devtmpfs", 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mounting /dev: %w", err)
		}
	}
	if vsockPort != 0 {
		memory := fill(usedMiB)
		defer runtime.KeepAlive(memory)
		return answerVsock(vsockPort)
	}
	port, err := openPort()
	if err != nil {
		return err
	}
	defer unix.Close(port)
	memory := fill(usedMiB)
	b := []byte{ready}
	for {
		if _, err := unix.Write(port, b); err != nil {
			return fmt.Errorf("answering: %w", err)
		}
		for {
			n, err := unix.Read(port, b)
			if err != nil && !errors.Is(err, unix.EINTR) {
				return fmt.Errorf("waiting for a byte: %w", err)
			}
			if n == 1 {
				break
			}
			// No peer has the port open (drivers/char/virtio_console.c, port_fops_read).
			time.Sleep(10 * time.Millisecond)
		}
		runtime.KeepAlive(memory)
	}
}

// answerVsock answers each byte with the same byte, one connection after another.
func answerVsock(port uint32) error {
	l, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("making a socket: %w", err)
	}
	defer unix.Close(l)
	if err := unix.Bind(l, &unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: port}); err != nil {
		return fmt.Errorf("taking port %d of vsock: %w", port, err)
	}
	if err := unix.Listen(l, 16); err != nil {
		return fmt.Errorf("listening on vsock: %w", err)
	}
	for {
		c, _, err := unix.Accept4(l, unix.SOCK_CLOEXEC)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.ECONNABORTED) || errors.Is(err, unix.ECONNRESET) {
			continue
		}
		if err != nil {
			return fmt.Errorf("waiting for a connection: %w", err)
		}
		// A connection ends when its peer closes it, or is gone after a resume.
		b := []byte{ready}
		for {
			if _, err := unix.Write(c, b); err != nil {
				break
			}
			n, err := unix.Read(c, b)
			for errors.Is(err, unix.EINTR) {
				n, err = unix.Read(c, b)
			}
			if n != 1 {
				break
			}
		}
		unix.Close(c)
	}
}

func openPort() (int, error) {
	for begin := time.Now(); ; {
		fd, err := unix.Open(peerPort, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err == nil {
			return fd, nil
		}
		if time.Since(begin) > portWait {
			return -1, fmt.Errorf("opening %s: %w", peerPort, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// fill makes memory in which a quarter of each page is random, so that it compresses to about a quarter, like the
// programs' memory in drowse's own guests.
func fill(mib int) []byte {
	const page = 4096
	memory := make([]byte, mib<<20)
	r := rand.NewChaCha8([32]byte{})
	for at := 0; at < len(memory); at += page {
		_, _ = r.Read(memory[at : at+page/4]) // never fails
	}
	return memory
}
