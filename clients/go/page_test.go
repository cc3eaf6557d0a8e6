package seqdedupe

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Every block of docs/start/go.md runs, in its order, in one folder.
func TestThePageIsTrue(t *testing.T) {
	page := first(os.ReadFile("../../docs/start/go.md"))
	s := realSidecar(t)
	root := first(filepath.Abs("../.."))
	folder := t.TempDir()
	run := func(command string) string {
		shell := exec.Command("bash", "-ec", command)
		shell.Dir = folder
		shell.Env = append(os.Environ(), "GOFLAGS=-mod=mod")
		out, err := shell.CombinedOutput()
		if err != nil {
			t.Fatalf("%s\n%s", command, out)
		}
		return string(out)
	}
	var printed []string
	for _, block := range regexp.MustCompile("(?ms)^```(\\w+)[^\n]*\n(.*?)^```$").FindAllStringSubmatch(string(page), -1) {
		text := strings.NewReplacer("$HOME/seqdedupe", root, "127.0.0.1:6660", s.address).Replace(block[2])
		if block[1] == "sh" {
			run(text)
			continue
		}
		if err := os.WriteFile(filepath.Join(folder, "main.go"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		run("go mod tidy")
		printed = append(printed, run("go run ."), run("go run ."))
	}
	if len(printed) != 4 || strings.Count(printed[0], " NOT_DUP ") != 3 || strings.Count(printed[1], " DUP ") != 3 ||
		strings.Count(printed[2], "order-service") != 3 || !strings.HasPrefix(printed[2], "0 order-service 0 order 0\n") {
		t.Error(printed)
	}
}
