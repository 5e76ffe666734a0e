// Command job answers each line of its input with how many it has had.
package main

import (
	"bufio"
	"fmt"
	"os"

	"example.org/job/count"
)

func main() {
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		fmt.Println(os.Getpid(), count.Version, count.Next())
	}
}
