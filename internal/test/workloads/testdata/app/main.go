// Command app is what runs in the test's container: it answers lines, and fetches a line from elsewhere when it is
// asked to.
package main

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"time"
)

var n atomic.Int64

func main() {
	l, err := net.Listen("tcp4", ":8080")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("listens")
	for {
		c, err := l.Accept()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		go serve(c)
	}
}

func serve(c net.Conn) {
	defer c.Close()
	in := bufio.NewScanner(c)
	for in.Scan() {
		if address, ok := strings.CutPrefix(in.Text(), "fetch "); ok {
			fmt.Fprintln(c, fetch(address))
			continue
		}
		host, _ := os.Hostname()
		fmt.Fprintln(c, host, os.Getpid(), n.Add(1))
	}
}

func fetch(address string) string {
	c, err := net.DialTimeout("tcp4", address, time.Minute)
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(line)
}
