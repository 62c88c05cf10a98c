//! The manual pages.

use crate::run;

/// Each page has the options of its command, and names only pages that the tool prints.
#[test]
fn each_named_page_is_printed() {
    let (mut pages, mut printed) = (vec![Vec::new()], Vec::new());
    while let Some(commands) = pages.pop() {
        let args: Vec<&str> = ["man"]
            .into_iter()
            .chain(commands.iter().map(String::as_str))
            .collect();
        let ran = run("", &args);
        assert_eq!(ran.code, 0, "{ran:?}");
        let page = ran.out.replace("\\-", "-");
        let name = args.join("-").replacen("man", "idempotency", 1);
        assert!(page.contains(&format!("\n{name} - ")), "{page}");
        assert!(page.contains("--store"), "{page}");
        for line in page.lines() {
            if let Some(of_command) = line.strip_suffix("(1)") {
                let command = of_command.strip_prefix(&format!("{name}-"));
                let command = command.expect("a command of the page");
                pages.push([&commands[..], &[command.to_owned()]].concat());
            }
        }
        printed.push(name);
    }
    for name in ["idempotency-resolve", "idempotency-proxy-policy"] {
        assert!(printed.iter().any(|it| it == name), "{printed:?}");
    }
    assert!(run("", &["man", "resolve"]).out.contains("force"));
    for command in ["help", "nothing"] {
        let ran = run("", &["man", command]);
        assert_eq!(ran.code, 2, "{ran:?}");
        let expected = format!("there is no manual page of {command}");
        assert!(ran.err.contains(&expected), "{ran:?}");
    }
}
